"""The share of each decision in what a policy gains of time, and in its divergence, by the models fitted to the runs.

A policy is measured as a whole; what each of its decisions did is what the fitted models say
(:mod:`~autoprec.tuning.decide.sampler.posterior`), and how sure they are of it: a figure is that of the most likely
law, and its 95 % interval holds all but the outer 2.5 % on either side of the laws drawn from everything that is still
possible. Nothing is measured for it.

Times add: a decision's gain is what its layers, or a parameter's value, save against the baseline's, and its share is
the part of the whole gain. Squared divergences add, too, over the groups of layers and the errors that parameters were
probed for. A parameter whose effect no probe shows (optimizer state) multiplies the divergence by ``exp(e)``; of the
squared divergence ``1 - exp(-2 E)`` is then due to all such parameters, where ``E`` is the sum of their effects, and to
each in proportion to its own. All shares of a policy add up to 1; one that makes things better than the baseline's is
negative.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from autoprec.support.arrays import np, npt
from autoprec.tuning.decide.problem import Params, Problem
from autoprec.tuning.decide.sampler.expectation import Expectation
from autoprec.tuning.decide.sampler.posterior import Vector
from autoprec.tuning.decide.sampler.prior import features_of

#: Laws that are drawn: the ends of an interval are then known to a tenth of its width.
DRAWS = 500
#: Percentiles: a 95 % interval.
_ENDS = (2.5, 97.5)
#: Decisions that are told one by one; the others are one row.
MOST_DECISIONS = 20
#: Parts of the whole below which a decision is left out: it did nothing.
_NOTHING = 1e-3
#: Sums of effects on ln(D) below which ``1 - exp(-2 E)`` is ``2 E``.
_SMALL = 1e-9

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Decision:
    """One decision, and what it did by each law: milliseconds saved, share of the squared divergence.

    Both are ``[1 + DRAWS]``, that of the most likely law first.
    """

    name: str
    choice: str
    over: str
    count: int
    saved_ms: Vector
    divergence: Vector


def decision_shares(problem: Problem, expectation: Expectation, params: Params, whole_ms: float) -> list[Row]:
    """Return what each decision of a policy did, those first that save most time; empty where it decides nothing.

    A row has ``decision`` (layers, or a parameter), ``choice`` and what it is ``over`` (the baseline's), ``layers``
    (how many; 0 of a parameter), and ``saved_ms``, ``time_share`` and ``divergence_share``, each a mapping of
    ``value``, ``low`` and ``high`` with a 95 % interval. ``time_share`` is None where the whole gain cannot be told
    from none. Equal layers of all blocks are one row. The last row, ``"together"``, has the whole gain, and
    ``whole_ms``: far outside the interval it says that the fit is wrong. ``source`` says of times whether they were
    ``fitted`` to timed runs or ``modelled``; divergence is always fitted.

    Args:
        expectation: the models, fitted to every run.
        params: the policy's.
        whole_ms: what the policy saves of a step as a whole, measured or modelled as times are.
    """
    decided = _decisions(problem, expectation, params)
    if all(one.choice == one.over for one in decided):
        return []
    found = _merged(decided)
    whole = np.sum([one.saved_ms for one in found], axis=0)
    told = _interval(whole)
    known = told["low"] > 0 or told["high"] < 0
    rows = []
    for one in _shortened(found):
        row: Row = {"decision": one.name, "choice": one.choice, "over": one.over, "layers": one.count}
        row["saved_ms"] = _interval(one.saved_ms)
        row["time_share"] = _interval(one.saved_ms / whole) if known else None
        rows.append(row | {"divergence_share": _interval(one.divergence)})
    together = {"decision": "together", "choice": "", "over": "", "layers": sum(one.count for one in found)}
    together |= {"saved_ms": told, "time_share": None, "divergence_share": None}
    together["whole_ms"] = float(f"{whole_ms:.4g}")
    source = "fitted" if expectation.goals.timed else "modelled"
    return [row | {"source": source} for row in (*rows, together)]


def _decisions(problem: Problem, expectation: Expectation, params: Params) -> list[_Decision]:
    """Return the decision of each group, then of each parameter that is not at its default."""
    rng, baseline = np.random.default_rng(0), problem.params_of(problem.baseline)
    point, base = expectation.points([params]), expectation.points([baseline])
    rows, here, before = np.arange(len(problem.groups)), point.index[0], base.index[0]
    used = point.features[0]
    saved, part = np.zeros((2, 1 + DRAWS, len(rows)))
    moved, factor = np.zeros((2, 1 + DRAWS, len(used)))
    probes = _probed(problem, expectation, params)
    for k in range(1 + DRAWS):
        times, _, effects = expectation.time.drawn(rng) if k else expectation.time.mean()
        saved[k], moved[k] = times[rows, before] - times[rows, here], -effects * used
        squares, scale, effects = expectation.divergence.drawn_law(rng) if k else expectation.divergence.law()
        part[k], probed, factor[k] = _shared(squares[rows, here], scale * probes, effects * used)
        factor[k] += probed
    names = problem.choice_names
    out = [
        _Decision(group.name, names[here[g]], names[before[g]], len(group.layers), saved[:, g], part[:, g])
        for g, group in enumerate(problem.groups)
    ]
    for f, (name, value) in enumerate(features_of(problem)):
        if used[f]:
            default = str(problem.parameters[name][0])
            out.append(_Decision(name, str(value), default, 0, moved[:, f], factor[:, f]))
    return out


def _probed(problem: Problem, expectation: Expectation, params: Params) -> Vector:
    """Return the squared gradient error ``[K]`` that each parameter's value was probed to add by itself."""
    baseline, error2 = problem.params_of(problem.baseline), expectation.prior.parameter_error2
    before = error2(baseline)

    def alone(name: str, value: Any) -> float:
        return error2({**baseline, name: value}) - before if problem.value(params, name) == value else 0.0

    return np.array([alone(name, value) for name, value in features_of(problem)], dtype=np.float64)


def _shared(part: Vector, probed: Vector, effects: Vector) -> tuple[Vector, Vector, Vector]:
    """Return the shares of the squared divergence: of groups, of parameters by their probes, and by their effects.

    Args:
        part: ``[G]`` what each group adds to the squared divergence.
        probed: ``[K]`` the same of each parameter's own error.
        effects: ``[K]`` of parameters on ln(D).
    """
    total, summed = float(part.sum() + probed.sum()), float(effects.sum())
    if not (math.isfinite(total) and total > 0):
        return np.zeros_like(part), np.zeros_like(probed), np.zeros_like(effects)
    left = math.exp(-2.0 * min(max(summed, -6.0), 6.0))
    each = (1.0 - left) / summed if abs(summed) > _SMALL else 2.0
    return part / total * left, probed / total * left, effects * each


def _merged(decisions: Sequence[_Decision]) -> list[_Decision]:
    """Return one decision per kind of layer and choice, and each parameter's; without those that did nothing."""
    kinds: dict[tuple[str, str, str], list[_Decision]] = {}
    for one in decisions:
        name = re.sub(r"\d+", "*", one.name) if one.count else one.name
        kinds.setdefault((name, one.choice, one.over), []).append(one)
    found = [
        same[0] if len(same) == 1 else _joined(same, f"{name} ({len(same)})") for (name, _, _), same in kinds.items()
    ]
    most = max((float(np.abs(one.saved_ms).max()) for one in found), default=0.0)

    def did_something(one: _Decision) -> bool:
        saved, moved = float(np.abs(one.saved_ms).max()), float(np.abs(one.divergence).max())
        return saved > _NOTHING * most or moved > _NOTHING

    return sorted(filter(did_something, found), key=lambda one: -abs(float(one.saved_ms[0])))


def _joined(same: Sequence[_Decision], name: str) -> _Decision:
    return _Decision(
        name,
        same[0].choice,
        same[0].over,
        sum(one.count for one in same),
        np.sum([one.saved_ms for one in same], axis=0),
        np.sum([one.divergence for one in same], axis=0),
    )


def _shortened(found: Sequence[_Decision]) -> list[_Decision]:
    """Return the decisions that are told one by one, and one for all the others."""
    if len(found) <= MOST_DECISIONS:
        return [*found]
    first, others = found[: MOST_DECISIONS - 1], found[MOST_DECISIONS - 1 :]
    rest = _joined(others, f"{len(others)} others")
    return [*first, _Decision(rest.name, "", "", rest.count, rest.saved_ms, rest.divergence)]


def _interval(values: npt.NDArray[np.float64]) -> dict[str, float]:
    """Return the figure of the most likely law, and the 95 % interval of those drawn, four digits each."""
    value, (low, high) = float(values[0]), np.percentile(values[1:], _ENDS)
    figures = {"value": value, "low": min(value, float(low)), "high": max(value, float(high))}
    return {name: float(f"{value:.4g}") for name, value in figures.items()}
