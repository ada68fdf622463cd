"""What ``autoprec show A B`` prints: what changed between two policies."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from autoprec.cli.console import print_json
from autoprec.cli.echo import echo

if TYPE_CHECKING:
    from autoprec.policy import Policy

#: Sections that say what was found, not what would run.
_TOLD = ("evidence", "guard")


def _text(value: Any) -> str:
    if value is None:
        return "(absent)"
    return value if isinstance(value, str) else json.dumps(value)


def print_differences(a: Policy, b: Policy, *, as_json: bool) -> int:
    """Print what changed from one policy to another, what would run first; return 1 if any of that did."""
    from autoprec.policy import diff_policies

    rows = diff_policies(a, b)
    told = [row for row in rows if row[0].partition(".")[0] in _TOLD]
    run = [row for row in rows if row not in told]
    if as_json:
        changes = [{"where": where, "a": old, "b": new} for where, old, new in (*run, *told)]
        print_json({"same": not run, "differences": changes})
        return 1 if run else 0
    for where, old, new in run:
        echo(f"{where}: {_text(old)} -> {_text(new)}")
    if not run:
        echo("no difference in what runs")
    for where, old, new in told:
        echo(f"({where}: {_text(old)} -> {_text(new)})")
    return 1 if run else 0
