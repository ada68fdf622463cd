"""The knapsack with several limits and with costs between neighbours, by Lagrange multipliers and local search.

Multipliers turn every bound into a price, which leaves one independent decision per group (with pair costs along a
chain, a shortest path). Each multiplier is found by bisection, one inside the other; single changes then use up what is
left. Not exact, and said so: :func:`autoprec.tuning.decide.solver.solve` enumerates small problems instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from autoprec.tuning.decide.tables import FloatTable, IntVector, Limit, PairCosts

__all__ = ["solve_relaxed"]

Vector = npt.NDArray[np.float64]
Cheapest = Callable[[FloatTable], IntVector]
#: Bisection steps per multiplier, by how many multipliers are nested.
_STEPS = {1: 40, 2: 24, 3: 14}


def solve_relaxed(
    time: FloatTable, error2: FloatTable, budget: float, *, limits: Sequence[Limit], pairs: PairCosts | None
) -> IntVector | None:
    """Return a fast assignment within all bounds, or None when none was found; see :func:`solver.solve`."""
    cheapest = _chooser(time, pairs)
    bounded = [limit for limit in (Limit(error2, budget), *limits) if np.isfinite(limit.bound)]
    if not bounded:
        return cheapest(time)
    costs = np.stack([np.where(np.isfinite(time), limit.cost, 0.0) for limit in bounded])
    bounds = np.array([limit.bound * (1 + 1e-12) for limit in bounded])
    found = _bisect(time, costs, bounds, len(bounded) - 1, cheapest)
    if found is None:
        found = _least(time, costs, bounds)
    return None if found is None else _improve(found, time, costs, bounds, pairs)


def _bisect(price: FloatTable, costs: FloatTable, bounds: Vector, depth: int, cheapest: Cheapest) -> IntVector | None:
    """Return the cheapest assignment within bounds 0..depth: the least multiplier of ``depth`` that meets its bound."""

    def at(multiplier: float) -> IntVector | None:
        priced = price + multiplier * costs[depth]
        return cheapest(priced) if depth == 0 else _bisect(priced, costs, bounds, depth - 1, cheapest)

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


def _chooser(time: FloatTable, pairs: PairCosts | None) -> Cheapest:
    """Return the function that finds the assignment of least price."""
    if not pairs:
        return lambda price: np.argmin(price, axis=1)
    if all(b == a + 1 for a, b in pairs):
        return lambda price: _shortest_path(price, pairs)
    neighbours = _neighbours(len(time), pairs)
    return lambda price: _local_optimum(price, neighbours)


def _shortest_path(price: FloatTable, pairs: PairCosts) -> IntVector:
    """Return the exact optimum when pair costs join only consecutive groups (Viterbi's algorithm)."""
    groups = len(price)
    best = price[0]
    came = np.zeros(price.shape, dtype=np.int64)
    for g in range(1, groups):
        cost = pairs.get((g - 1, g))
        through = best[:, None] + (cost if cost is not None else 0.0)
        came[g] = np.argmin(through, axis=0)
        best = np.min(through, axis=0) + price[g]
    choice = np.zeros(groups, dtype=np.int64)
    choice[-1] = int(np.argmin(best))
    for g in range(groups - 1, 0, -1):
        choice[g - 1] = came[g, choice[g]]
    return choice


Neighbours = list[list[tuple[int, FloatTable]]]


def _neighbours(groups: int, pairs: PairCosts | None) -> Neighbours:
    out: Neighbours = [[] for _ in range(groups)]
    for (a, b), cost in (pairs or {}).items():
        out[a].append((b, cost))
        out[b].append((a, cost.T))
    return out


def _local_optimum(price: FloatTable, neighbours: Neighbours) -> IntVector:
    """Return the best of the local optima reached from the free optimum and from every uniform start."""
    free: IntVector = np.argmin(price, axis=1)
    starts = [free] + [np.where(np.isfinite(price[:, c]), c, free) for c in range(price.shape[1])]
    best, least = free, np.inf
    for start in starts:
        choice = start.astype(np.int64)
        for _ in range(12):
            before = choice.copy()
            for g, around in enumerate(neighbours):
                extra = sum((cost[:, choice[other]] for other, cost in around), np.zeros(price.shape[1]))
                choice[g] = int(np.argmin(price[g] + extra))
            if (choice == before).all():
                break
        total = _total(choice, price, neighbours)
        if total < least:
            best, least = choice, total
    return best


def _total(choice: IntVector, time: FloatTable, neighbours: Neighbours) -> float:
    total = float(time[np.arange(len(choice)), choice].sum())
    extra = sum(float(cost[choice[g], choice[o]]) for g, around in enumerate(neighbours) for o, cost in around)
    return total + extra / 2


def _improve(
    choice: IntVector, time: FloatTable, costs: FloatTable, bounds: Vector, pairs: PairCosts | None
) -> IntVector:
    """Take the best single change that keeps every bound, until there is none."""
    choice = choice.copy()
    rows = np.arange(len(choice))
    neighbours = _neighbours(len(time), pairs)
    for _ in range(3 * len(choice)):
        effective = time.copy()
        for g, around in enumerate(neighbours):
            for other, cost in around:
                effective[g] = effective[g] + cost[:, choice[other]]
        saved = effective[rows, choice][:, None] - effective
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
