"""``autoprec export``: a policy as configuration of another training stack."""

from __future__ import annotations

from pathlib import Path

import click

from autoprec.cli import options
from autoprec.cli.echo import echo
from autoprec.errors import FileError

_TARGETS = (
    "python, torchao, transformer-engine, accelerate, megatron, dlfw-inspect, lightning, deepspeed, msamp, axolotl, "
    "torchtitan"
)


def known_layers(path: Path) -> dict[str, str]:
    """Return name -> kind of the layers of a file: what ``autoprec inspect --json`` prints, or one name per line."""
    from autoprec.graph.report import MAX_GRAPH_BYTES
    from autoprec.support.files import read_document, read_text

    try:
        document = read_document(path, most_bytes=MAX_GRAPH_BYTES)  # it lists every operator as well
    except FileError:
        lines = read_text(path).splitlines() if path.is_file() else []
        names = tuple(line.strip() for line in lines if line.strip() and not line.startswith("#"))
        if not names or any(set(name) & set("{}: ") for name in names):
            raise
        return dict.fromkeys(names, "")
    rows = document.get("layers")
    if not isinstance(rows, list) or not all(isinstance(row, dict) and "name" in row for row in rows):
        raise FileError("holds no layers", where=str(path), fix="write it with autoprec inspect --json train.py")
    return {str(row["name"]): str(row.get("kind", "")) for row in rows if row.get("tunable", True)}


def layer_names(path: Path) -> tuple[str, ...]:
    """Return the names of :func:`known_layers`."""
    return tuple(known_layers(path))


@click.command("export", short_help="Write a policy as configuration of another training stack.")
@click.argument("policy", type=click.Path(path_type=Path))
@click.option("--to", "target", required=True, metavar="TARGET", help=f"One of: {_TARGETS}.")
@click.option("-o", "--output", type=click.Path(path_type=Path), default=Path("."), help="Directory to write to.")
@options.layers
@click.option("--allow-lossy", is_flag=True, help="Write it although the target cannot express all of it.")
@options.force
def export(policy: Path, target: str, output: Path, layers: Path | None, allow_lossy: bool, force: bool) -> int:
    """Write POLICY in the form another training stack reads.

    What the target cannot express is listed; without --allow-lossy nothing is written then, and the exit code is 1.
    """
    from autoprec.export import export as write
    from autoprec.policy import load_policy
    from autoprec.support.files import write_atomic

    found = known_layers(layers) if layers else {}
    done = write(load_policy(policy), target, layers=found, allow_lossy=allow_lossy, name=policy.name)
    for name in done.files:
        options.check_absent(output / name, force=force)
    for name, text in done.files.items():
        echo(str(write_atomic(output / name, text)))
    for line in done.lossy:
        echo(f"lost: {line}", err=True)
    for what, by in done.kept.items():
        echo(f"kept: {what}: {by}", err=True)
    for note in done.notes:
        echo(f"note: {note}", err=True)
    return 0
