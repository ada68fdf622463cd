"""``autoprec export``: a policy as configuration of another training stack."""

from __future__ import annotations

from pathlib import Path

import click

from autoprec.cli import options
from autoprec.cli.echo import echo
from autoprec.errors import FileError
from autoprec.export import EXPORTERS, importers
from autoprec.export import export as write
from autoprec.graph.report import MAX_GRAPH_BYTES
from autoprec.policy import document, load_policy
from autoprec.support.files import read_document, read_text, write_atomic


def known_layers(path: Path) -> dict[str, str]:
    """Return name -> kind of the layers of a file: what ``autoprec inspect --json`` prints, or one name per line."""
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


def _imported(path: Path, layers: dict[str, str]) -> tuple[dict[str, str], list[str]]:
    """Return the file (name -> text) of another stack's configuration as a policy, and notes on it.

    Raises:
        FileError: it is not the configuration of a stack that is read.
        UnsupportedError, PolicyError: it asks for what a policy cannot say.
    """
    beside = path.with_name("megatron_flags.txt")  # as `autoprec export` writes them
    words = read_text(beside).split() if beside.is_file() else []
    done = importers.import_policy(read_document(path), layers=tuple(layers), flags=words)
    return {"policy.yaml": document.yaml_text(done.policy.to_dict())}, list(done.notes)


@click.command("export", short_help="A policy as another training stack's configuration, or that as a policy.")
@click.argument("policy", type=click.Path(path_type=Path))
@click.option("--to", "target", required=True, metavar="TARGET", help=f"One of: {', '.join(EXPORTERS)}; policy.")
@click.option("-o", "--output", type=click.Path(path_type=Path), default=Path("."), help="Directory to write to.")
@click.option("--layers", type=click.Path(path_type=Path), help="Layer names of the model (inspect --json, or a list).")
@click.option("--allow-lossy", is_flag=True, help="Write it although the target cannot express all of it.")
@options.force
def export(policy: Path, target: str, output: Path, layers: Path | None, allow_lossy: bool, force: bool) -> int:
    """Write POLICY in the form another training stack reads.

    What the target cannot express is listed; without --allow-lossy nothing is written then, and the exit code is 1.

    With --to policy, POLICY is such a stack's file: accelerate's fp8_config, Megatron's --te-precision-config-file (its
    flags are read from megatron_flags.txt beside it), a NeMo Automodel recipe, torchao's FqnToConfig
    as JSON, or TE recipe keys.
    Settings that their library ignores are translated or refused, and named on stderr.
    """
    known = known_layers(layers) if layers else {}
    told: dict[str, list[str]] = {}
    if target == "policy":
        files, told["note"] = _imported(policy, known)
    else:
        done = write(load_policy(policy), target, layers=known, allow_lossy=allow_lossy, name=policy.name)
        files = done.files
        told["lost"] = [str(line) for line in done.lossy]
        told["kept"] = [f"{what}: {by}" for what, by in done.kept.items()]
        told["note"] = list(done.notes)
    for name in files:
        options.check_absent(output / name, force=force)
    for name, text in files.items():
        echo(str(write_atomic(output / name, text)))
    for kind, lines in told.items():
        for line in lines:
            echo(f"{kind}: {line}", err=True)
    return 0
