"""The guard on the losses of whole runs: what it detects, when, and how often it is wrong.

The runs (``long_run.py --guard``: 600 steps; 18 healthy ones and 16 that break at half for each model) were trained
without a guard; it looks at their losses and gradient norms afterwards, step by step, as it would have during the run
(it has no model there, so it can only warn). *Damage* is the largest excess of the smoothed loss over the paired
reference; a divergence is a run whose damage is more than a tenth of the reference's loss there. How the guard looks
for jumps was chosen on seeds 100 and 101 of gpt, mlp and moe: the figures are told for these and for all others apart.
"""

from __future__ import annotations

import math
import statistics
from typing import Any

from autoprec.applying.guard import Guard
from autoprec.policy import Policy

__all__ = ["guard_lines"]

SMOOTH, DIVERGED, EARLY = 25, 0.1, 0.2
Row = dict[str, Any]


def smoothed(losses: list[float]) -> list[float]:
    return [statistics.median(losses[max(0, i - SMOOTH + 1) : i + 1]) for i in range(len(losses))]


def first_breach(row: Row) -> int | None:
    """Return the step of the first breach, None without any."""
    guard = Guard(Policy())
    for loss, norm in zip(row["series"]["losses"], row["series"]["norms"], strict=True):
        breach = guard.step(loss, norm)
        if breach is not None:
            return breach.step
    return None


def excess(row: Row, reference: Row) -> list[float]:
    """Return the smoothed loss over the reference's, relative to it, at every step."""
    own, other = (smoothed(r["series"]["losses"]) for r in (row, reference))
    return [(a - b) / b if math.isfinite(a) else math.inf for a, b in zip(own, other, strict=False)]


def guard_lines(rows: list[Row]) -> str:
    """Return the guard's figures."""
    references = {(row["task"], row["seed"]): row for row in rows if row["what"] == "guard reference"}
    runs = [row for row in rows if row["seed"] >= 100 and row["what"] != "guard reference"]
    runs = [row for row in runs if (row["task"], row["seed"]) in references]
    if not runs:
        return ""
    lines, told = [], []
    chosen_on = [row for row in runs if row["seed"] in (100, 101) and row["task"] != "vit"]
    others = [row for row in runs if row not in chosen_on]
    for label, these in (
        ("seeds and models the guard was tuned on", chosen_on),
        ("seeds and models the guard was not tuned on", others),
    ):
        alarms = diverged = seen = healthy = 0
        for row in these:
            reference = references[row["task"], row["seed"]]
            step = first_breach(row)
            name = f"{row['task']} {row['what']} seed {row['seed']}"
            if not row["what"].startswith("broken"):
                healthy, alarms = healthy + 1, alarms + (step is not None)
                told += [f"{label}: false alarm, {name} at step {step}"] if step is not None else []
                continue
            gaps = excess(row, reference)
            damage = max(gaps)
            if damage <= DIVERGED:
                continue
            diverged += 1
            half = row["steps"] // 2
            early = step is not None and step > half and gaps[min(step, len(gaps)) - 1] <= EARLY * damage
            seen += early
            at = "never" if step is None else f"at {gaps[min(step, len(gaps)) - 1] / damage:.0%}, step {step}"
            told += [] if early else [f"{label}: late, {name} {at} (damage {damage:.0%} of the loss)"]
        lines.append(f"| {label} | {alarms} of {healthy} | {seen} of {diverged} |")
    head = "| | false alarms, healthy runs | divergences detected before 20 % of their damage |\n|---|---|---|"
    return "### Guard\n\n" + "\n".join([head, *lines, "", *(f"- {line}" for line in told)])
