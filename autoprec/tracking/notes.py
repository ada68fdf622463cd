"""What a person reads on a run's page: names of trials, parameters of a study, and the winner table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from autoprec.tuning.study.records import SearchResult, TrialRecord

__all__ = ["parent_note", "parent_params", "trial_name"]

#: Reasons in a study's description; the report has them all.
MOST_REASONS = 12


def trial_name(record: TrialRecord) -> str:
    """Return the run name of a trial: its number, its name and, for paired repeats, its seed."""
    seed = f" (seed {record.seed})" if record.seed else ""
    name = record.name or record.kind
    plain = name if name.startswith("trial ") else f"{record.number:03d} {name}"
    return f"{plain}{seed}"[:250]


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


def _number(row: Mapping[str, Any], key: str, form: str, unit: str = "") -> str:
    value = row.get(key)
    return f"{value:{form}}{unit}" if isinstance(value, (int, float)) else "-"


def _line(name: str, row: Mapping[str, Any]) -> str:
    memory = row.get("memory_bytes")
    cells = [
        name.replace("|", "/"),
        _number(row, "speedup", ".2f", "x"),
        _number(row, "step_time_ms", ".2f"),
        f"{memory / 2**20:,.0f}" if isinstance(memory, (int, float)) else "-",
        _number(row, "divergence", ".3%"),
        _number(row, "gradient_error", ".3f"),
    ]
    return "| " + " | ".join(cells) + " |"


def _rows(result: SearchResult) -> Iterable[str]:
    if result.verdict == "adopt":
        yield _line("**the policy**", result.best)
    elif result.best.get("name") != result.reference.get("name"):
        yield _line("best measured", result.best)
    yield _line("reference (the script as written)", result.reference)
    for preset in result.presets:
        yield _line(f"preset: {preset.get('name', '?')}", preset)


def parent_note(result: SearchResult) -> str:
    """Return the Markdown of the study's description: verdict, winner table, how to use the policy."""
    script = Path(result.script).name if result.script else "train.py"
    lines = [  # the table first: MLflow folds a description after its first few lines
        "| what | speed | step ms | memory MiB | divergence | gradient error |",
        "|---|---:|---:|---:|---:|---:|",
        *_rows(result),
        "",
        f"**{'Adopt' if result.verdict == 'adopt' else 'Stay'}**: {result.reason}",
        "",
        f"Target **{result.target or 'this machine'}**, script `{script}`.",
        "",
        "Filter the trials with `tags.pareto = 'true'`, `tags.finalist = 'true'`, `tags.preset = 'true'`.",
    ]
    reasons = result.explanation.get("layers", ())
    if reasons:
        lines += ["", "| layers | why |", "|---|---|"]
        lines += [f"| `{row['layers']}` | {str(row['text']).replace('|', '/')} |" for row in reasons[:MOST_REASONS]]
    decisions = result.explanation.get("importance", ())
    if decisions:
        shown = (
            f"`{d['name']}` ({d['time_share']:.0%} of time, {d['error_share']:.0%} of divergence)" for d in decisions
        )
        lines += ["", "What mattered most: " + ", ".join(shown) + "."]
    if result.policy and result.verdict == "adopt":
        lines += ["", "Use it:", "```", f"autoprec run --policy {result.policy} {script}", "```"]
    return "\n".join(lines)
