"""What a person reads on a run's page: names of trials, parameters of a study, and the winner table."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from autoprec.report.summary import important
from autoprec.support.text import markdown_text, visible
from autoprec.tuning.study.records import SearchResult
from autoprec.tuning.study.rows import headings, over_16bit, row_cells
from autoprec.tuning.study.run import Run

#: Reasons in a study's description; the report has them all.
MOST_REASONS = 12
#: A script of less than this share of the 16-bit run's speed is not drawn beside policies.
_NEAR = 0.5


def trial_name(record: Run) -> str:
    """Return the run name of a trial: its name, a star where it is the answer and, for paired repeats, their seed."""
    seed = (f" (seed {record.seed})" if record.seed else " (whole model)") if record.kind == "finalist" else ""
    star = "\N{BLACK STAR} " if "best" in record.tags else ""
    return f"{star}{record.name or record.kind}{seed}"[:250]


def shown_metrics(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the figures of the trials table, in the units people read and rounded to what means something.

    MLflow prints a metric with all its digits, so the table shows these copies: ``gain`` (over the best 16-bit run
    where that is known, else over the script as written), ``step_ms``, ``divergence_pct``, ``memory_gib`` and
    ``gradient_error_pct``. The metrics they are made of are logged beside them, unrounded.
    """
    parts = (
        ("gain", "speedup_over_16bit" if "speedup_over_16bit" in metrics else "speedup", 1.0, 2),
        ("step_ms", "step_time_ms", 1.0, 1 if (metrics.get("step_time_ms") or 0.0) >= 100.0 else 2),
        ("divergence_pct", "divergence", 100.0, 3),
        ("memory_gib", "memory_bytes", 2.0**-30, 2),
        ("gradient_error_pct", "gradient_error", 100.0, 2),
    )
    out = {}
    for name, source, factor, digits in parts:
        value = metrics.get(source)
        if isinstance(value, (int, float)) and math.isfinite(value):
            out[name] = round(factor * value, digits)
    return out


def reference_figures(metrics: Mapping[str, Any], *, drawn: bool = True) -> dict[str, float]:
    """Return the script's figures of the table, once it is known how it compares with the 16-bit run.

    Its divergence is from itself: 0, which says nothing. Without it the script is not drawn in the chart of time
    against divergence, where an fp32 script that takes ten times as long as bf16 would push all policies into one
    corner; a script that comes near the 16-bit run is drawn.
    """
    shown = shown_metrics(metrics)
    if not drawn or metrics.get("speedup_over_16bit", 1.0) < _NEAR:
        shown.pop("divergence_pct", None)
    return shown


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
