"""What a person reads on the page of a study's own run: its parameters, its limits, and the winner table."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from autoprec.report.summary import important
from autoprec.support.text import markdown_text, visible
from autoprec.tuning.study.records import SearchResult
from autoprec.tuning.study.rows import headings, over_16bit, row_cells

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

    Divergence and gradient error are fractions (the latter of the gradient's norm), memory is in bytes.
    """
    budget = result.budget
    limits = {
        "divergence": budget.get("max_divergence"),
        "gradient_error": budget.get("gradient_limit"),
        "memory": info.get("max_memory"),
    }
    return {f"limit.{name}": f"{value:.6g}" for name, value in limits.items() if value is not None}


def _line(name: str, row: Mapping[str, Any], over: bool) -> str:
    cells = row_cells({**row, "name": markdown_text(name)}, over_16bit=over)
    return "| " + " | ".join(cells) + " |"


def _table(result: SearchResult) -> Iterable[str]:
    """Yield the Markdown table of the policy, the script and the presets, as the report shows them."""
    over = over_16bit(result.rows())
    names = ("what", *headings(over_16bit=over)[1:])
    yield "| " + " | ".join(names) + " |"
    yield "|---|" + "---:|" * (len(names) - 1)
    for row in result.rows():
        name = str(row["name"])
        title = {"best": f"**{name}**", "preset": f"preset: {name}"}.get(row["role"], name)
        yield _line(title, row, over)


def parent_note(result: SearchResult) -> str:
    """Return the Markdown of the study's description: verdict, winner table, how to use the policy."""
    script = Path(result.script).name if result.script else "train.py"
    lines = [  # the table first: MLflow folds a description after its first few lines
        *_table(result),
        "",
        f"**{result.verdict.capitalize()}**: {markdown_text(result.reason)}",
        "",
        f"Target **{markdown_text(result.target) or 'this machine'}**, script {markdown_text(f'`{script}`')}.",
        "",
        "Filter the trials with `tags.pareto = 'true'`, `tags.finalist = 'true'`, `tags.preset = 'true'`.",
    ]
    reasons = result.explanation.get("layers", ())
    if reasons:
        lines += ["", "| layers | why |", "|---|---|"]
        lines += [
            "| " + " | ".join(map(markdown_text, (f"`{row['layers']}`", str(row["text"])))) + " |"
            for row in reasons[:MOST_REASONS]
        ]
    decisions = important(result)
    if decisions:
        shown = (f"{markdown_text(f'`{name}`')} ({time} of time, {gap} of divergence)" for name, time, gap in decisions)
        lines += ["", "What mattered most: " + ", ".join(shown) + "."]
    if result.verdict == "stay":
        lines += ["", "Nothing is registered in the model registry: the script stays as it is."]
    if result.policy and result.verdict == "adopt":
        lines += [
            "",
            "Use it:",
            "```",
            visible(f"autoprec run --policy {shlex.quote(result.policy)} {shlex.quote(script)}"),
            "```",
        ]
    return "\n".join(lines)
