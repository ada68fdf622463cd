"""``autoprec diff``: what changed between two policies."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from autoprec.cli.console import print_json
from autoprec.cli.echo import echo


def _text(value: Any) -> str:
    if value is None:
        return "(absent)"
    return value if isinstance(value, str) else json.dumps(value)


@click.command("diff")
@click.argument("a", type=click.Path(path_type=Path))
@click.argument("b", type=click.Path(path_type=Path))
@click.option("--all", "everything", is_flag=True, help="Compare the evidence too, not only what would run.")
@click.option("--json", "as_json", is_flag=True, help="The differences as JSON on stdout.")
def diff(a: Path, b: Path, everything: bool, as_json: bool) -> int:
    """Print what changed from policy A to policy B; exit 1 if anything did (as diff does)."""
    from autoprec.policy import diff_policies, load_policy

    rows = [
        row
        for row in diff_policies(load_policy(a), load_policy(b))
        if everything or row[0].partition(".")[0] not in ("evidence", "guard")
    ]
    if as_json:
        changes = [{"where": where, "a": old, "b": new} for where, old, new in rows]
        print_json({"same": not rows, "differences": changes})
    for where, old, new in [] if as_json else rows:
        echo(f"{where}: {_text(old)} -> {_text(new)}")
    if not rows and not as_json:
        echo("no difference" if everything else "no difference in what runs (--all compares evidence too)")
    return 1 if rows else 0
