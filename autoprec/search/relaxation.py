"""The knapsack with several limits and with costs between neighbours, by Lagrange multipliers and local search.

Multipliers turn every bound into a price, which leaves one independent decision per group (or, with pair costs, a few
sweeps of iterated conditional modes). The multipliers are raised until all bounds hold; single changes then use up what
is left. Not exact, and said so: :func:`autoprec.search.solver.solve` enumerates small problems instead.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from autoprec.search.tables import FloatTable, IntVector, Limit, PairCosts

__all__ = ["solve_relaxed"]

_ROUNDS = 40


def solve_relaxed(
    time: FloatTable, error2: FloatTable, budget: float, *, limits: Sequence[Limit], pairs: PairCosts | None
) -> IntVector | None:
    """Return a fast assignment within all bounds, or None when none was found; see :func:`solver.solve`."""
    bounded = [limit for limit in (Limit(error2, budget), *limits) if np.isfinite(limit.bound)]
    neighbours = _neighbours(len(time), pairs)
    if not bounded:
        return _cheapest(time, neighbours)
    costs = np.stack([np.where(np.isfinite(time), limit.cost, 0.0) for limit in bounded])
    bounds = np.array([limit.bound for limit in bounded])
    multipliers = np.zeros(len(bounded))
    scale = np.array([_price_scale(time, cost) for cost in costs])
    best: IntVector | None = None
    best_time = np.inf
    step = 1.0
    for _ in range(_ROUNDS):
        choice = _cheapest(time + np.tensordot(multipliers, costs, axes=1), neighbours)
        used = costs[:, np.arange(len(time)), choice].sum(axis=1)
        over = used - bounds * (1 + 1e-12)
        if (over <= 0).all():
            choice = _improve(choice, time, costs, bounds, neighbours)
            total = _total(choice, time, neighbours)
            if total < best_time:
                best, best_time = choice, total
            multipliers = multipliers * (1 - 0.5 * step)
        else:
            share = np.where(over > 0, np.maximum(over / np.maximum(np.abs(bounds), 1e-300), 0.02), 0.0)
            growth = np.where(
                over > 0, np.maximum(multipliers * (np.minimum(share, 3.0) * step), scale * 0.05 * step), 0.0
            )
            multipliers = multipliers + growth
        step = max(0.05, step * 0.93)
    return best if best is not None else _least(time, costs, bounds)


def _price_scale(time: FloatTable, cost: FloatTable) -> float:
    """Return the median time saved per unit of cost: the natural size of a multiplier."""
    finite = np.isfinite(time)
    spread_time = np.ptp(np.where(finite, time, np.nanmin(np.where(finite, time, np.nan))), axis=1)
    spread_cost = np.ptp(np.where(finite, cost, 0.0), axis=1)
    ratio = spread_time[spread_cost > 0] / spread_cost[spread_cost > 0]
    return float(np.median(ratio)) if len(ratio) else 1.0


Neighbours = list[list[tuple[int, FloatTable]]]


def _neighbours(groups: int, pairs: PairCosts | None) -> Neighbours:
    out: Neighbours = [[] for _ in range(groups)]
    for (a, b), cost in (pairs or {}).items():
        out[a].append((b, cost))
        out[b].append((a, cost.T))
    return out


def _cheapest(price: FloatTable, neighbours: Neighbours) -> IntVector:
    """Return the assignment of least price; with pair costs a local optimum from two starts."""
    choice: IntVector = np.argmin(price, axis=1)
    if not any(neighbours):
        return choice
    for _ in range(12):
        before = choice.copy()
        for g, around in enumerate(neighbours):
            if around:
                extra = sum((cost[:, choice[other]] for other, cost in around), np.zeros(price.shape[1]))
                choice[g] = int(np.argmin(price[g] + extra))
        if (choice == before).all():
            break
    return choice


def _total(choice: IntVector, time: FloatTable, neighbours: Neighbours) -> float:
    total = float(time[np.arange(len(choice)), choice].sum())
    extra = sum(float(cost[choice[g], choice[o]]) for g, around in enumerate(neighbours) for o, cost in around)
    return total + extra / 2


def _improve(
    choice: IntVector, time: FloatTable, costs: npt.NDArray[np.float64], bounds: FloatTable, neighbours: Neighbours
) -> IntVector:
    """Take the best single change that keeps every bound, until there is none."""
    choice = choice.copy()
    rows = np.arange(len(choice))
    for _ in range(3 * len(choice)):
        effective = time.copy()
        for g, around in enumerate(neighbours):
            for other, cost in around:
                effective[g] = effective[g] + cost[:, choice[other]]
        saved = effective[rows, choice][:, None] - effective
        spent = costs - costs[:, rows, choice][:, :, None]
        room = bounds - costs[:, rows, choice].sum(axis=1)
        fits = (spent <= room[:, None, None] + 1e-15).all(axis=0) & np.isfinite(time)
        saved = np.where(fits, saved, -np.inf)
        g, c = divmod(int(np.argmax(saved)), saved.shape[1])
        if saved[g, c] <= 1e-12:
            break
        choice[g] = c
    return choice


def _least(time: FloatTable, costs: npt.NDArray[np.float64], bounds: FloatTable) -> IntVector | None:
    """Return the assignment that uses the least of the scarcest bound, if it keeps all of them."""
    rows = np.arange(len(time))
    for cost in (*costs, (costs / np.maximum(np.abs(bounds), 1e-300)[:, None, None]).sum(axis=0)):
        choice: IntVector = np.argmin(np.where(np.isfinite(time), cost, np.inf), axis=1)
        if (costs[:, rows, choice].sum(axis=1) <= bounds * (1 + 1e-12)).all():
            return choice
    return None
