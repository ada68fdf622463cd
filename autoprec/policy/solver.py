"""Which choice for which group: the multiple-choice knapsack over time, squared error, and further limits.

Squared relative gradient errors of single groups add over a mixed assignment (:mod:`autoprec.tuning.decide.table`),
so "the fastest policy within an error budget" is a *multiple-choice knapsack*: every group takes exactly one of its
choices, times add, squared errors add, and the sum of the errors is bounded.

A Lagrange multiplier turns a bound into a price per unit of error, which leaves one independent decision per group: the
choice with the least ``time + price * error``. The price that meets the bound is where the two assignments around it
cost the same (Handler and Zang, "A dual algorithm for the constrained shortest path problem", Networks 10, 1980), and
single changes use up what is left; further limits (memory, a limit on the gradient error beside a budget of divergence)
have multipliers of their own, found by bisection around it. Small problems are enumerated, and exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autoprec.support.arrays import np, npt

#: ``[G, C]`` float64: a row per group, a column per choice; infinite where a group does not offer a choice.
FloatTable = npt.NDArray[np.float64]
#: ``[G]`` int64: the column each group takes.
IntVector = npt.NDArray[np.int64]
Vector = npt.NDArray[np.float64]
#: Assignments that are enumerated.
_MAX_ENUMERATED = 50_000
#: Bisection steps per multiplier around the innermost, by how many there are in all; and the logarithm of the factor by
#: which a price may differ from time per unit of cost.
_STEPS, _WIDEST = {2: 28, 3: 16}, 30.0
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
    offered = np.isfinite(time) & np.isfinite(error2)
    time = np.where(offered, time, np.inf)
    bounded = [limit for limit in (Limit(error2, budget), *limits) if np.isfinite(limit.bound)]
    costs = (
        np.stack([np.where(offered, limit.cost, 0.0) for limit in bounded]) if bounded else np.zeros((0, *time.shape))
    )
    bounds = np.array([limit.bound * _ROUNDING for limit in bounded])
    if np.log(np.maximum(offered.sum(axis=1), 1)).sum() <= np.log(_MAX_ENUMERATED):
        return _enumerate(time, costs, bounds)
    least = np.where(offered, costs, np.inf).min(axis=2).sum(axis=1)
    if (least > bounds).any():
        return None
    found = _bisect(time, costs, bounds, len(bounded))
    return None if found is None else _improve(found, time, costs, bounds)


def _enumerate(time: FloatTable, costs: FloatTable, bounds: Vector) -> IntVector | None:
    options = [np.flatnonzero(np.isfinite(row)) for row in time]
    rows, every = np.arange(len(time)), 1
    grid = np.empty((int(np.prod([len(columns) for columns in options])), len(time)), dtype=np.int64)
    for g in reversed(rows):
        grid[:, g] = options[g][np.arange(len(grid)) // every % len(options[g])]
        every *= len(options[g])
    fits = np.ones(len(grid), dtype=bool)
    for cost, bound in zip(costs, bounds, strict=True):
        fits &= cost[rows, grid].sum(axis=1) <= bound
    found: IntVector = grid[int(np.argmin(np.where(fits, time[rows, grid].sum(axis=1), np.inf)))]
    return found if fits.any() else None


def _bisect(price: FloatTable, costs: FloatTable, bounds: Vector, count: int) -> IntVector | None:
    """Return the cheapest assignment within the first ``count`` bounds: the least multiplier that meets the last."""
    rows = np.arange(len(price))
    if not count:
        cheapest: IntVector = np.argmin(price, axis=1)
        return cheapest
    cost, bound = costs[count - 1], bounds[count - 1]
    if count == 1:
        return _crossing(price, cost, float(bound))

    def at(multiplier: float) -> tuple[IntVector | None, bool]:
        choice = _bisect(price + multiplier * cost, costs, bounds, count - 1)
        return choice, choice is not None and float(cost[rows, choice].sum()) <= bound

    best, fits = at(0.0)
    if best is None or fits:
        return best
    unit = float(np.ptp(price[np.isfinite(price)])) / max(float(np.ptp(cost)), 1e-300)
    low, high = -_WIDEST, _WIDEST
    best, fits = at(unit * np.exp(high))
    if not fits:
        return None
    for _ in range(_STEPS.get(len(bounds), 12)):
        middle = (low + high) / 2
        choice, fits = at(unit * np.exp(middle))
        if fits:
            best, high = choice, middle
        else:
            low = middle
    return best


def _crossing(price: FloatTable, cost: FloatTable, bound: float) -> IntVector | None:
    """Return the cheapest assignment within one bound that a multiplier gives, or None where nothing is within it.

    Of an assignment beyond the bound and one within it, the price of both is equal at one multiplier. What is cheapest
    there takes the place of one of them, until nothing is cheaper than they are.
    """
    rows = np.arange(len(price))

    def sums(choice: IntVector) -> tuple[float, float]:
        return float(price[rows, choice].sum()), float(cost[rows, choice].sum())

    beyond: IntVector = np.argmin(price, axis=1)
    dear, spent = sums(beyond)
    if spent <= bound:
        return beyond
    within: IntVector = np.lexsort((price, np.where(np.isfinite(price), cost, np.inf)), axis=1)[:, 0]
    cheap, least = sums(within)
    if least > bound:
        return None
    while spent > least:
        multiplier = max(cheap - dear, 0.0) / (spent - least)
        middle = np.argmin(price + multiplier * cost, axis=1)
        own, used = sums(middle)
        both = dear + multiplier * spent
        if own + multiplier * used >= both - 1e-12 * max(abs(both), abs(dear)):
            break
        if used <= bound:
            within, cheap, least = middle, own, used
        else:
            dear, spent = own, used
    return within


def _improve(choice: IntVector, time: FloatTable, costs: FloatTable, bounds: Vector) -> IntVector:
    """Take the best single change that keeps every bound, until there is none."""
    choice = choice.copy()
    rows = np.arange(len(choice))
    for _ in range(3 * len(choice)):
        saved = time[rows, choice][:, None] - time
        spent = costs - costs[:, rows, choice][:, :, None]
        room = bounds - costs[:, rows, choice].sum(axis=1)
        fits = (spent <= room[:, None, None]).all(axis=0)
        saved = np.where(fits, saved, -np.inf)
        g, c = divmod(int(np.argmax(saved)), saved.shape[1])
        if saved[g, c] <= 1e-12:
            break
        choice[g] = c
    return choice
