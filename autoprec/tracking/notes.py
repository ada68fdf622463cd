"""What a person reads on the page of a study's own run: its parameters, its limits, and the winner table."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from autoprec.reports.text import verdict_lines
from autoprec.support.text import markdown_text, visible
from autoprec.tuning.study.records import SearchResult

#: Reasons in a study's description; the report has them all.
MOST_REASONS = 12


def parent_params(info: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Return a study's settings as flat parameters: nested keys joined by dots, lists joined by spaces."""
    out: dict[str, str] = {}
    for key, value in info.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            out |= parent_params(value, f"{name}.")
        elif isinstance(value, (list, tuple)):
            out[name] = " ".join(str(item) for item in value)
        elif value is not None:
            out[name] = str(value)
    return out


def limits_of(result: SearchResult, info: Mapping[str, Any]) -> dict[str, str]:
    """Return the limits that policies were held against, as parameters of the study's run.

    Divergence (of a metric its change) and gradient error are fractions (the latter of the gradient's norm), memory is
    in bytes.
    """
    limits = {
        "change" if result.metric else "divergence": result.limit,
        "gradient_error": result.budget.get("gradient_limit"),
        "memory": info.get("max_memory"),
    }
    return {f"limit.{name}": f"{value:.6g}" for name, value in limits.items() if value is not None}


def parent_note(result: SearchResult) -> str:
    """Return the Markdown of the study's description: winner table, verdict, reasons, how to use the policy."""
    script = Path(result.script).name if result.script else "train.py"
    titles, rows = result.comparison()
    verdict, *caveats = verdict_lines(result)
    why = [(f"`{row['layers']}`", str(row["text"])) for row in result.explanation.get("layers", ())[:MOST_REASONS]]
    lines = [  # the table first: MLflow folds a description after its first few lines
        *_table(("what", *titles[1:]), [cells for _, cells in rows]),
        "",
        f"**{result.verdict.capitalize()}.** {markdown_text(verdict)}",
        *(["", *(f"- {markdown_text(line)}" for line in caveats)] if caveats else []),
        "",
        f"Target **{markdown_text(result.target) or 'this machine'}**, script {markdown_text(f'`{script}`')}.",
        "",
        "Filter the trials with `tags.pareto = 'true'`, `tags.finalist = 'true'`, `tags.preset = 'true'`.",
        *(["", "## Why", "", *_table(("layers", "why"), why)] if why else []),
    ]
    if result.verdict == "stay":
        lines += ["", "Nothing is registered in the model registry: the script stays as it is."]
    if result.policy and result.verdict == "adopt":
        command = visible(f"autoprec run --policy {shlex.quote(result.policy)} {shlex.quote(script)}")
        lines += ["", "Use it:", "```", command, "```"]
    return "\n".join(lines)


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    marks = ["---" if index == 0 else "---:" for index in range(len(headings))]
    return ["| " + " | ".join(map(markdown_text, row)) + " |" for row in (headings, marks, *rows)]
