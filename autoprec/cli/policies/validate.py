"""``autoprec validate``: are these files valid policies, search spaces or target tables?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from autoprec.cli.console import print_json
from autoprec.cli.echo import echo
from autoprec.errors import AutoPrecError, FileError
from autoprec.policy import Policy, load_policy
from autoprec.policy.space import space_from_dict
from autoprec.precision.hardware import load_targets
from autoprec.support.files import read_document


def _describe(path: Path) -> str:
    """Validate one file by the schema it names; return what it is.

    Raises:
        FileError: it is not valid, or of no schema that AutoPrec knows.
    """
    document = read_document(path)
    schema = document.get("schema")
    if schema == "autoprec.space/1":
        space = space_from_dict(document, where=str(path))
        return f"search space '{space.name}', {len(space.choices)} rules of choices"
    if schema == "autoprec.targets/1":
        return f"targets: {', '.join(sorted(load_targets(path)))}"
    if schema != "autoprec.policy/1":
        known = ("autoprec.policy/1", "autoprec.space/1", "autoprec.targets/1")
        raise FileError(f"schema is {schema!r}", where=str(path), fix=f"the first line names one of {', '.join(known)}")

    policy: Policy = load_policy(path)
    phases = f", {len(policy.phases)} phases" if policy.phases else ""
    return f"policy, {len(policy.layers)} rules, {len(policy.recipes)} recipes{phases}"


@click.command("validate")
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="One object per file as JSON on stdout.")
def validate(files: tuple[Path, ...], as_json: bool) -> int:
    """Check policy, search-space and target FILES; exit 2 if any is not valid. Loading is data only."""
    rows: list[dict[str, Any]] = []
    for path in files:
        try:
            rows.append({"file": str(path), "ok": True, "what": _describe(path), "fix": ""})
        except AutoPrecError as error:
            rows.append({"file": str(path), "ok": False, "what": error.what, "fix": error.fix})
    if as_json:
        print_json({"ok": all(row["ok"] for row in rows), "files": rows})
    for row in [] if as_json else rows:
        echo(f"{row['file']}: {'valid ' if row['ok'] else 'not valid: '}{row['what']}", err=not row["ok"])
        if row["fix"]:
            echo(f"  fix: {row['fix']}", err=True)
    return 0 if all(row["ok"] for row in rows) else 2
