"""``autoprec import``: another stack's configuration as a policy."""

from __future__ import annotations

from pathlib import Path

import click

from autoprec.cli import options
from autoprec.cli.echo import echo


@click.command("import", short_help="Read another stack's configuration as a policy.")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("-o", "--output", type=click.Path(path_type=Path), default=Path("policy.yaml"), show_default=True,
              help="Where the policy goes.")  # fmt: skip
@click.option("--as-space", is_flag=True, help="Write a search space with the configuration as a preset instead.")
@options.layers
@options.force
def import_(file: Path, output: Path, layers: Path | None, as_space: bool, force: bool) -> int:
    """Read FILE (accelerate fp8_config, Megatron --te-precision-config-file, or TE recipe keys) as a policy.

    Megatron's flags are read from megatron_flags.txt beside FILE. Settings that their library ignores are translated or
    refused, and named on stderr.
    """
    from autoprec.cli.policies.export import layer_names
    from autoprec.export import importers
    from autoprec.policy import dump_yaml, save_policy
    from autoprec.support.files import read_document, read_text, write_atomic

    options.check_absent(output, force=force)
    beside = file.with_name("megatron_flags.txt")  # as `autoprec export` writes them
    words = read_text(beside).split() if beside.is_file() else []
    names = layer_names(layers) if layers else ()
    done = importers.import_policy(read_document(file), layers=names, flags=words)
    if as_space:
        echo(str(write_atomic(output, dump_yaml(importers.as_space(done.policy, file.stem)))))
    else:
        echo(str(save_policy(done.policy, output)))
    for note in done.notes:
        echo(f"note: {note}", err=True)
    return 0
