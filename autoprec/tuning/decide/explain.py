"""Why each kind of layer got its precision: facts from the tables and the trials.

Nothing here decides; it reads what the decision used, with times as they were fitted to the runs. Facts are rows with a
sentence each; equal layers of all blocks that got the same choice are one row. Errors are relative gradient errors, in
units of the mini-batch gradient noise where that is known; times are of the target, measured or modelled as the tables
are. What each decision did, with how sure that is, is :mod:`autoprec.tuning.decide.sampler.shares`'s.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

from autoprec.policy.solver import FloatTable
from autoprec.support.arrays import np
from autoprec.tuning.decide.problem import Params, Problem
from autoprec.tuning.decide.table import SensitivityTable
from autoprec.tuning.study.run import error_text

#: What a choice has to gain of a group's time to be called faster: as much as the fit leaves of one run's time.
_FASTER = 0.01
#: Rows that are kept: a person reads no more.
MOST_REASONS = 40

Row = dict[str, Any]


def explain_layers(
    problem: Problem, params: Params, time_ms: FloatTable, table: SensitivityTable, whole_ms: float | None = None
) -> list[Row]:
    """Return why each group runs what it runs, a row per group in model order.

    ``saved_ms`` is its time against the baseline's, ``gradient_error`` what it adds by itself, ``error_share`` its part
    of the whole policy's squared error; ``text`` says it in one sentence.

    Args:
        time_ms: ``[G, C]`` time of each group under each choice.
        whole_ms: what the whole policy saves of a step, measured; what the groups save is no more in all. None where
            times are modelled, and add up by themselves.
    """
    index, names = problem.indices(params), problem.choice_names
    base = [_reference(problem, group.choices) for group in problem.groups]
    times = [float(time_ms[g, base[g]] - time_ms[g, index[g]]) for g in range(len(index))]
    together = sum(times)
    scale = 1.0 if whole_ms is None or together <= 0 else min(1.0, max(0.0, whole_ms) / together)
    about = "" if whole_ms is None else "about "
    rows = np.arange(len(index))
    total = float(table.error2[rows, index].sum()) + table.parameter_error2(problem, params)
    refused = {group: why for group, _, why in reversed(problem.refused)}
    out = []
    for g, group in enumerate(problem.groups):
        here, reference, error2 = names[int(index[g])], names[base[g]], float(table.error2[g, index[g]])
        error, saved, share = math.sqrt(error2), times[g] * scale, error2 / total if total > 0 else 0.0
        other = _next_faster(time_ms[g], int(index[g]))
        tail = "nothing offered is faster"
        if other is not None:
            more = math.sqrt(float(table.error2[g, other]))
            tail = f"{names[other]} would be faster and add {_amount(more, table.noise)}"
        adds = f"adds {_amount(error, table.noise)} ({share:.0%} of the policy's)"
        if len(group.choices) == 1:
            text = "nothing else to choose" + (f" ({refused[group.name]})" if group.name in refused else "")
        elif here == reference:
            text = tail
        elif saved > 0:
            text = f"saves {about}{saved:.3g} ms of a step against {reference}, {adds}; {tail}"
        else:  # what is adopted is the policy, which was measured as a whole
            slower = f"expected to be {about}{-saved:.3g} ms slower than {reference}" if saved else "gains no time"
            text = f"{slower}, {adds}; no better policy that was measured has another choice here"
        row = {"layers": group.name, "count": len(group.layers), "choice": here, "saved_ms": saved}
        out.append(row | {"gradient_error": error, "error_share": share, "text": f"{here}: {text}"})
    return out


def _reference(problem: Problem, choices: Sequence[str]) -> int:
    """Return the choice that a group's gain is given over."""
    return problem.choice_names.index(problem.baseline if problem.baseline in choices else choices[0])


def _next_faster(times: FloatTable, chosen: int) -> int | None:
    """Return the slowest choice that is still faster than the chosen one: the next step down in precision."""
    least = _FASTER * abs(float(times[chosen])) + 1e-12 if math.isfinite(times[chosen]) else 0.0
    faster = [c for c in np.flatnonzero(np.isfinite(times)) if times[c] < times[chosen] - least]
    return int(max(faster, key=lambda c: times[c])) if faster else None


def _amount(error: float, noise: float | None) -> str:
    if not math.isfinite(error):
        return "a gradient that is not finite"
    return f"an error of {error_text(error, noise)}"


def explanation(
    problem: Problem, time_ms: FloatTable, table: SensitivityTable, params: Params, whole_ms: float | None = None
) -> dict[str, Any]:
    """Return the reasons behind a point as plain data.

    Args:
        time_ms, whole_ms: as in :func:`explain_layers`.

    Returns:
        ``layers``: one mapping per kind of layer and choice (``layers``, ``count``, ``choice``, ``saved_ms``,
        ``gradient_error``, ``error_share``, ``text``), those that save most first.
    """
    return {"layers": merged(explain_layers(problem, params, time_ms, table, whole_ms))[:MOST_REASONS]}


def _kind(name: str) -> str:
    """Return a layer's name without the numbers of its blocks."""
    return re.sub(r"\d+", "*", name)


def merged(rows: Sequence[Row]) -> list[Row]:
    """Return one row per kind of group and choice: savings add, errors add in quadrature.

    The sentence is that of the group that adds most, where the choice is most in question, and says the sums after it.
    """
    kinds: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        kinds.setdefault((_kind(row["layers"]), row["choice"]), []).append(row)
    out: list[Row] = []
    for (name, _), same in kinds.items():
        error = math.sqrt(sum(row["gradient_error"] ** 2 for row in same))
        most = max(same, key=lambda row: row["gradient_error"])
        saved, share, text = sum(row["saved_ms"] for row in same), sum(row["error_share"] for row in same), most["text"]
        if len(same) > 1 and saved:
            text += f". That is {most['layers']}; all {len(same)} together: {saved:.3g} ms, {share:.0%} of the error"
        out.append(
            most
            | {
                "text": text,
                "layers": same[0]["layers"] if len(same) == 1 else f"{name} ({len(same)})",
                "count": sum(row["count"] for row in same),
                "saved_ms": round(saved, 6),
                "gradient_error": float(f"{error:.4g}") if math.isfinite(error) else None,
                "error_share": round(share, 4),
            }
        )
    return sorted(out, key=lambda row: -row["saved_ms"])


def as_evidence(reasons: dict[str, Any]) -> dict[str, Any]:
    """Return the reasons as sentences for a policy's evidence: ``why`` by layers."""
    why: dict[str, str] = {}
    for row in reasons.get("layers", ()):
        why[row["layers"] if row["layers"] not in why else f"{row['layers']} {row['choice']}"] = row["text"]
    return {"why": why} if why else {}
