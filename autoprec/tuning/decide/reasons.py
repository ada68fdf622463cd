"""Why an answer is as it is: why each kind of layer got its precision, and which decisions mattered.

The facts are those of :mod:`autoprec.tuning.decide.explain`, taken from the models as the finished trials left them;
equal layers of all blocks that got the same choice are one row.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from autoprec.policy.solver import FloatTable
from autoprec.policy.space import Choice
from autoprec.tuning.decide.explain import LayerReason, explain_layers, importance, learned_times
from autoprec.tuning.decide.problem import Params, Problem
from autoprec.tuning.decide.sampler.prior import LayerTime
from autoprec.tuning.decide.table import SensitivityTable
from autoprec.tuning.study.run import Run

#: Rows that are kept of each list: a person reads no more.
MOST_REASONS, MOST_DECISIONS = 40, 8
#: Decisions below this share of both variances are left out: what noise explains has a share of zero.
LEAST_SHARE = 0.005
#: The models are fitted to this many trials at most, the first and the newest, as the sampler's are.
MOST_RECORDS = 200


def explanation(
    problem: Problem,
    layer_time_ms: LayerTime,
    table: SensitivityTable,
    trials: Sequence[Run],
    params: Params,
    whole_ms: float | None = None,
    limit: float | None = None,
) -> dict[str, Any]:
    """Return the reasons behind a point as plain data.

    Args:
        layer_time_ms: modelled milliseconds of a layer (by name) under a plan and an autocast dtype.
        trials: what was tried, failures included.
        whole_ms: what it saves of a step against the baseline, measured; None where times are modelled.
        limit: the largest relative gradient error of a whole policy; None where there is none.

    Returns:
        ``layers``: one mapping per kind of layer and choice (``layers``, ``count``, ``choice``, ``saved_ms``,
        ``gradient_error``, ``error_share``, ``text``), those that save most first; ``importance``: one mapping per
        decision (``name``, ``time_share``, ``error_share``, ``error_sd``), the most important first.
    """
    finished = [record for record in trials if _finite(record)]
    records = (
        finished
        if len(finished) <= MOST_RECORDS
        else finished[: MOST_RECORDS // 4] + finished[-3 * MOST_RECORDS // 4 :]
    )
    modelled = _modelled_times(problem, layer_time_ms)
    times = learned_times(problem, modelled, table, records)
    reasons = explain_layers(problem, params, times, table, whole_ms, limit)
    decisions = importance(problem, modelled, table, records)
    return {
        "layers": merged(reasons)[:MOST_REASONS],
        "importance": [
            {
                "name": d.name,
                "time_share": round(d.time_share, 4),
                "error_share": round(d.error_share, 4),
                "error_sd": round(d.error_sd, 4),
            }
            for d in decisions[:MOST_DECISIONS]
            if max(d.time_share, d.error_share) >= LEAST_SHARE
        ],
    }


def merged(reasons: Sequence[LayerReason]) -> list[dict[str, Any]]:
    """Return one row per kind of group and choice: savings add, errors add in quadrature."""
    kinds: dict[tuple[str, str], list[LayerReason]] = {}
    for reason in reasons:
        kinds.setdefault((re.sub(r"\d+", "*", reason.group), reason.choice), []).append(reason)
    rows = []
    for (name, choice), same in kinds.items():
        error = math.sqrt(sum(r.gradient_error**2 for r in same))
        row: dict[str, Any] = {
            "layers": same[0].group if len(same) == 1 else f"{name} ({len(same)})",
            "count": sum(len(r.layers) for r in same),
            "choice": choice,
            "saved_ms": round(sum(r.saved_ms for r in same), 6),
            "gradient_error": float(f"{error:.4g}") if math.isfinite(error) else None,
            "error_share": round(sum(r.error_share for r in same), 4),
            # the sentence of the one that adds most: where the choice is most in question
            "text": max(same, key=lambda r: r.gradient_error if math.isfinite(r.gradient_error) else math.inf).text,
        }
        rows.append(row)
    return sorted(rows, key=lambda row: -row["saved_ms"])


def stay_explanation(rows: Sequence[Mapping[str, Any]], baseline: str) -> dict[str, Any]:
    """Return why each kind of layer stays as it is where no trial was needed to say so.

    Args:
        rows: one per tunable layer, as in :attr:`autoprec.cost.verdict.Verdict.rows`.
        baseline: the choice that they are judged against, and stay in.

    Returns:
        What :func:`explanation` returns: the kinds that take most of the step first, no decision called important.
    """
    kinds: dict[tuple[str, str, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        kinds.setdefault((re.sub(r"\d+", "*", row["name"]), row["best"], row["blocked"]), []).append(row)
    out = []
    for (name, best, _), same in sorted(kinds.items(), key=lambda kind: -sum(row["baseline_ms"] for row in kind[1])):
        largest = max(same, key=lambda row: row["baseline_ms"])
        text = str(largest["reason"])
        if largest["gain_ms"] > 0:
            text = f"{best} would save {largest['gain']:.0%} of it, too little of the step to matter"
        out.append(
            {
                "layers": largest["name"] if len(same) == 1 else f"{name} ({len(same)})",
                "count": len(same),
                "choice": baseline,
                "saved_ms": 0.0,
                "gradient_error": None,
                "error_share": 0.0,
                "text": text,
            }
        )
    return {"layers": out[:MOST_REASONS], "importance": []}


def as_evidence(reasons: dict[str, Any]) -> dict[str, Any]:
    """Return the reasons as sentences for a policy's evidence: ``why`` by layers, ``mattered`` by decision."""
    why: dict[str, str] = {}
    for row in reasons.get("layers", ()):
        name = row["layers"] if row["layers"] not in why else f"{row['layers']} {row['choice']}"
        share = f"; together {row['saved_ms']:.3g} ms and {row['error_share']:.0%} of the error"
        why[name] = row["text"] + (share if row["layers"].endswith(")") and row["saved_ms"] else "")
    mattered = {
        d["name"].removeprefix("layer:"): f"{d['time_share']:.0%} of what moves time, {error_share(d)} of divergence"
        for d in reasons.get("importance", ())
    }
    return {name: value for name, value in (("why", why), ("mattered", mattered)) if value}


def error_share(decision: Mapping[str, Any]) -> str:
    """Return a decision's share of what moves divergence, with its standard deviation where that is known."""
    share, sd = float(decision["error_share"]), float(decision.get("error_sd", 0.0))
    return f"{share:.0%} ± {sd:.0%}" if sd >= 0.005 else f"{share:.0%}"


def _finite(record: Run) -> bool:
    return record.ok and all(math.isfinite(record[name]) for name in ("divergence", "step_time_ms"))


def _modelled_times(problem: Problem, layer_time_ms: LayerTime) -> FloatTable:
    """Return ``[G, C]`` milliseconds by the cost model."""
    recipes = problem.space.all_recipes
    activations = str(problem.value(problem.params_of(problem.baseline), "activations"))
    plans = {name: Choice.parse(name).plan(recipes) for name in problem.choice_names}
    return np.asarray(
        problem.table(lambda g, c: sum(layer_time_ms(layer, plans[c], activations) for layer in g.layers))
    )
