"""Which choice for which group: the multiple-choice knapsack over time, squared error, and further limits.

Squared relative gradient errors of single groups add over a mixed assignment (:mod:`autoprec.tuning.decide.table`),
so "the fastest policy within an error budget" is a *multiple-choice knapsack*: every group takes exactly one of its
choices, times add, squared errors add, and the sum of the errors is bounded.

A Lagrange multiplier turns a bound into a price per unit of error, which leaves one independent decision per group: the
choice with the least ``time + price * error``. What comes out at any price is the fastest assignment of its own error:
a corner of the front between "safest" and "fastest" (:func:`corners`). For a budget the price is found by bisection,
and single changes use up what is left; further limits (memory, a limit on the gradient error beside a budget of
divergence) have multipliers of their own, one bisection inside the other. Small problems are enumerated, and exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["FloatTable", "IntVector", "Limit", "corners", "solve"]

#: ``[G, C]`` float64: a row per group, a column per choice; infinite where a group does not offer a choice.
FloatTable = npt.NDArray[np.float64]
#: ``[G]`` int64: the column each group takes.
IntVector = npt.NDArray[np.int64]
Vector = npt.NDArray[np.float64]
#: Assignments that are enumerated.
_MAX_ENUMERATED = 50_000
#: Bisection steps per multiplier, by how many multipliers are nested.
_STEPS = {1: 40, 2: 24, 3: 14}
#: Prices that are looked at for each corner that is wanted.
_PRICES_PER_CORNER = 8
#: Bounds are met up to float64 rounding of the sums.
_ROUNDING = 1 + 1e-12


@dataclass(frozen=True, slots=True)
class Limit:
    """A further additive quantity ``[G, C]`` (memory, a second error measure) and its upper bound."""

    cost: FloatTable
    bound: float


def solve(time: FloatTable, error2: FloatTable, budget: float, *, limits: Sequence[Limit] = ()) -> IntVector | None:
    """Return the fastest assignment whose squared errors sum to at most ``budget``.

    Args:
        time: ``[G, C]``; infinite where a group does not offer a choice. May be negative (a difference to a baseline).
        error2: ``[G, C]`` >= 0.
        budget: upper bound of the sum of ``error2``; infinity for none.
        limits: further additive bounds.

    Returns:
        ``[G]`` columns, or None when nothing that fits was found.
    """
    time = np.where(np.isfinite(time) & np.isfinite(error2), time, np.inf)
    combinations = float(np.exp(min(50.0, np.log(np.maximum(np.isfinite(time).sum(axis=1), 1)).sum())))
    if combinations <= _MAX_ENUMERATED:
        return _enumerate(time, error2, budget, limits)
    bounded = [limit for limit in (Limit(error2, budget), *limits) if np.isfinite(limit.bound)]
    if not bounded:
        fastest: IntVector = np.argmin(time, axis=1)
        return fastest
    costs = np.stack([np.where(np.isfinite(time), limit.cost, 0.0) for limit in bounded])
    bounds = np.array([limit.bound * _ROUNDING for limit in bounded])
    found = _bisect(time, costs, bounds, len(bounded) - 1)
    if found is None:
        found = _least(time, costs, bounds)
    return None if found is None else _improve(found, time, costs, bounds)


def corners(time: FloatTable, error2: FloatTable, points: int = 64) -> npt.NDArray[np.int64]:
    """Return assignments ``[P, G]`` along the front from least error to least time, each the fastest of its own error.

    They are the cheapest at a price of error that falls from above the steepest exchange of any group to below the
    flattest; evenly chosen if there are more than ``points``. What lies between two is found by :func:`solve`.
    """
    usable = np.where(np.isfinite(time) & np.isfinite(error2), time, np.inf)
    errors = np.where(np.isfinite(usable), error2, 0.0)
    with np.errstate(invalid="ignore", divide="ignore"):
        rates = (usable[:, :, None] - usable[:, None, :]) / (errors[:, None, :] - errors[:, :, None])
    rates = rates[np.isfinite(rates) & (rates > 0)]
    high, low = (float(rates.max()), float(rates.min())) if len(rates) else (1.0, 1.0)
    prices = np.geomspace(2 * high, low / 2, _PRICES_PER_CORNER * points)
    found = np.array([np.argmin(usable + price * errors, axis=1) for price in prices], dtype=np.int64)
    found = found[np.concatenate([[True], (found[1:] != found[:-1]).any(axis=1)])]
    kept = np.unique(np.linspace(0, len(found) - 1, min(len(found), max(2, points))).astype(np.int64))
    return np.asarray(found[kept], dtype=np.int64)


def _enumerate(time: FloatTable, error2: FloatTable, budget: float, limits: Sequence[Limit]) -> IntVector | None:
    """Try every assignment."""
    options = [np.flatnonzero(np.isfinite(row)) for row in time]
    rows, free = np.arange(len(time)), [g for g, columns in enumerate(options) if len(columns) > 1]
    axes = np.meshgrid(*(options[g] for g in free), indexing="ij") if free else []
    grid = np.tile([columns[0] for columns in options], (axes[0].size if free else 1, 1)).astype(np.int64)
    for g, axis in zip(free, axes, strict=True):
        grid[:, g] = axis.ravel()
    total = time[rows, grid].sum(axis=1)
    fits = error2[rows, grid].sum(axis=1) <= budget * _ROUNDING
    for limit in limits:
        fits &= limit.cost[rows, grid].sum(axis=1) <= limit.bound * _ROUNDING
    if not fits.any():
        return None
    found: IntVector = grid[int(np.argmin(np.where(fits, total, np.inf)))]
    return found


def _bisect(price: FloatTable, costs: FloatTable, bounds: Vector, depth: int) -> IntVector | None:
    """Return the cheapest assignment within bounds 0..depth: the least multiplier of ``depth`` that meets its bound."""

    def at(multiplier: float) -> IntVector | None:
        priced = price + multiplier * costs[depth]
        return np.argmin(priced, axis=1) if depth == 0 else _bisect(priced, costs, bounds, depth - 1)

    def fits(choice: IntVector | None) -> bool:
        return choice is not None and float(costs[depth][rows, choice].sum()) <= bounds[depth]

    rows = np.arange(len(price))
    best = at(0.0)
    if best is None or fits(best):
        return best
    low, high = 0.0, _price_scale(price, costs[depth])
    for _ in range(40):
        best = at(high)
        if best is None or fits(best):
            break
        low, high = high, 8 * high
    else:
        return None
    for _ in range(_STEPS.get(len(bounds), 10)):
        middle = (low + high) / 2 if low else high / 8
        candidate = at(middle)
        if candidate is not None and fits(candidate):
            best, high = candidate, middle
        else:
            low = middle
    return best


def _price_scale(time: FloatTable, cost: FloatTable) -> float:
    """Return the median time saved per unit of cost: the natural size of a multiplier."""
    finite = np.isfinite(time)
    low = np.where(finite, time, np.inf).min(axis=1, keepdims=True)
    spread_time = np.where(finite, time - low, 0.0).max(axis=1)
    spread_cost = np.ptp(np.where(finite, cost, 0.0), axis=1)
    usable = (spread_cost > 0) & (spread_time > 0)
    return float(np.median(spread_time[usable] / spread_cost[usable])) if usable.any() else 1.0


def _improve(choice: IntVector, time: FloatTable, costs: FloatTable, bounds: Vector) -> IntVector:
    """Take the best single change that keeps every bound, until there is none."""
    choice = choice.copy()
    rows = np.arange(len(choice))
    for _ in range(3 * len(choice)):
        saved = time[rows, choice][:, None] - time
        spent = costs - costs[:, rows, choice][:, :, None]
        room = bounds - costs[:, rows, choice].sum(axis=1)
        fits = (spent <= room[:, None, None]).all(axis=0) & np.isfinite(time)
        saved = np.where(fits, saved, -np.inf)
        g, c = divmod(int(np.argmax(saved)), saved.shape[1])
        if saved[g, c] <= 1e-12:
            break
        choice[g] = c
    return choice


def _least(time: FloatTable, costs: FloatTable, bounds: Vector) -> IntVector | None:
    """Return the assignment that uses the least of the bounds, if it keeps all of them."""
    rows = np.arange(len(time))
    for cost in (*costs, (costs / np.maximum(np.abs(bounds), 1e-300)[:, None, None]).sum(axis=0)):
        choice: IntVector = np.argmin(np.where(np.isfinite(time), cost, np.inf), axis=1)
        if (costs[:, rows, choice].sum(axis=1) <= bounds).all():
            return choice
    return None
