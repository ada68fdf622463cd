"""Which choice for which group: the multiple-choice knapsack over time, squared error, and further limits.

Squared relative gradient errors of single groups add over a mixed assignment (:mod:`autoprec.tuning.decide.table`),
so "the fastest policy within an error budget" is a *multiple-choice knapsack*: every group takes exactly one of its
choices, times add, squared errors add, and the sum of the errors is bounded.

The linear relaxation has a simple solution. Draw a group's choices as points (error, time): only the corners of their
lower convex hull can be optimal, and each step along the hull buys time at a falling rate per unit of error. Taking all
groups' steps in order of that rate, from the safest assignment on, gives the whole front between "safest" and "fastest"
in one pass (:func:`corners`; Sinha and Zoltners, Operations Research 27, 1979). What the walk leaves of a budget is
filled by a dynamic program over non-dominated partial assignments, which is exact unless it has to drop states (never
on small problems).

Further limits (memory, a limit on the gradient error beside a budget of divergence) are rarely binding: the exact
answer is tried first. Where one is, small problems are enumerated and large ones relaxed: Lagrange multipliers turn
every bound into a price per unit, which leaves one independent decision per group; each multiplier is found by
bisection, one inside the other, and single changes use up what is left. That is near the optimum, not exact.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

__all__ = ["FloatTable", "IntVector", "Limit", "corners", "solve"]

#: ``[G, C]`` float64: a row per group, a column per choice; infinite where a group does not offer a choice.
FloatTable = npt.NDArray[np.float64]
#: ``[G]`` int64: the column each group takes.
IntVector = npt.NDArray[np.int64]
Vector = npt.NDArray[np.float64]
#: Partial assignments that the dynamic program keeps per group.
_MAX_STATES = 4096
#: Groups up to which the dynamic program is worth its time; beyond, the walk is within 0.2 % of the linear bound.
_MAX_FILLED = 128
#: Assignments that are enumerated where several limits bind.
_MAX_ENUMERATED = 50_000
#: Bisection steps per multiplier, by how many multipliers are nested.
_STEPS = {1: 40, 2: 24, 3: 14}
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
        limits: further additive bounds (exact on small problems and where none of them binds).

    Returns:
        ``[G]`` columns, or None when nothing fits.
    """
    time = np.where(np.isfinite(time) & np.isfinite(error2), time, np.inf)
    if not limits:
        return _knapsack(time, error2, budget)
    combinations = float(np.exp(min(50.0, np.log(np.maximum(np.isfinite(time).sum(axis=1), 1)).sum())))
    if combinations <= _MAX_ENUMERATED:
        return _enumerate(time, error2, budget, limits)
    free = _knapsack(time, error2, budget)
    rows = np.arange(len(time))
    if free is None or all(float(x.cost[rows, free].sum()) <= x.bound for x in limits):
        return free
    return _relaxed(time, error2, budget, limits)


def _enumerate(time: FloatTable, error2: FloatTable, budget: float, limits: Sequence[Limit]) -> IntVector | None:
    """Try every assignment (small problems with limits)."""
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


@dataclass(frozen=True)
class _Hull:
    """All groups' hull steps in order of falling gain per error: group, column reached, and the differences."""

    start: IntVector
    group: IntVector
    column: IntVector
    saved: FloatTable
    spent: FloatTable


def _hull(time: FloatTable, error2: FloatTable) -> _Hull:
    """Return the hull of two tables; the same tables are solved for several budgets in a row."""
    return _hull_of(time.shape, np.asarray(time, np.float64).tobytes(), np.asarray(error2, np.float64).tobytes())


@lru_cache(maxsize=2)
def _hull_of(shape: tuple[int, int], time_bytes: bytes, error2_bytes: bytes) -> _Hull:
    """Return every group's least-error choice and the steps along its lower convex hull."""
    time, error2 = (np.frombuffer(raw).reshape(shape) for raw in (time_bytes, error2_bytes))
    start = np.zeros(len(time), dtype=np.int64)
    steps: list[tuple[int, int, float, float]] = []
    for g in range(len(time)):
        columns = np.flatnonzero(np.isfinite(time[g]))
        order = columns[np.lexsort((time[g, columns], error2[g, columns]))]
        hull = [int(order[0])]
        for c in order[1:]:
            if time[g, c] >= time[g, hull[-1]]:
                continue
            while len(hull) > 1 and _slope(time[g], error2[g], hull[-2], hull[-1]) <= _slope(
                time[g], error2[g], hull[-2], int(c)
            ):
                hull.pop()
            if error2[g, c] == error2[g, hull[-1]]:
                hull[-1] = int(c)
            else:
                hull.append(int(c))
        start[g] = hull[0]
        for a, b in itertools.pairwise(hull):
            steps.append((g, b, time[g, a] - time[g, b], error2[g, b] - error2[g, a]))
    steps.sort(key=lambda s: -s[2] / s[3])
    table = np.array(steps, dtype=np.float64).reshape(-1, 4)
    return _Hull(start, table[:, 0].astype(np.int64), table[:, 1].astype(np.int64), table[:, 2], table[:, 3])


def _slope(time: FloatTable, error2: FloatTable, a: int, b: int) -> float:
    """Return time saved per squared error spent from choice a to choice b; infinity for free."""
    spent = error2[b] - error2[a]
    return float((time[a] - time[b]) / spent) if spent > 0 else np.inf


def _knapsack(time: FloatTable, error2: FloatTable, budget: float) -> IntVector | None:
    hull = _hull(time, error2)
    rows = np.arange(len(time))
    used = float(error2[rows, hull.start].sum())
    room = budget * _ROUNDING - used
    if room < 0:
        return None
    choice = hull.start.copy()
    for g, c, spent in zip(hull.group, hull.column, hull.spent, strict=True):
        # a step is taken only from the hull point before it, which an earlier (better) step reached
        step = error2[g, c] - error2[g, choice[g]]
        if 0 <= step <= room and time[g, c] < time[g, choice[g]]:
            choice[g] = c
            room -= step
        elif spent > room and room <= 0:
            break
    choice = _swap(choice, time, error2, room)
    if len(time) <= _MAX_FILLED:
        better = _fill(time, error2, budget * _ROUNDING, hull, float(time[rows, choice].sum()))
        choice = choice if better is None else better
    return choice


def _swap(choice: IntVector, time: FloatTable, error2: FloatTable, room: float) -> IntVector:
    """Take the best single changes that still fit, largest saving first."""
    choice = choice.copy()
    rows = np.arange(len(choice))
    for _ in range(4 * len(choice)):
        saved = time[rows, choice][:, None] - time
        spent = error2 - error2[rows, choice][:, None]
        saved = np.where((spent <= room) & np.isfinite(time), saved, -np.inf)
        g, c = np.unravel_index(int(np.argmax(saved)), saved.shape)
        if saved[g, c] <= 1e-15:
            break
        room -= float(spent[g, c])
        choice[g] = c
    return choice


def _fill(time: FloatTable, error2: FloatTable, budget: float, hull: _Hull, incumbent: float) -> IntVector | None:
    """Return a strictly better assignment than the incumbent if there is one (dynamic program with bounds).

    Groups are added one by one; a state is a partial assignment's (time, error). States that another dominates, or
    whose linear-relaxation bound over the remaining groups is no better than the incumbent, are dropped.
    """
    groups = len(time)
    order = np.argsort(-(np.ptp(np.where(np.isfinite(time), time, time.min(axis=1, keepdims=True)), axis=1)))
    position = np.empty(groups, dtype=np.int64)
    position[order] = np.arange(groups)
    times, errors = np.zeros(1), np.zeros(1)
    history: list[tuple[IntVector, IntVector]] = []
    for depth, g in enumerate(order):
        columns = np.flatnonzero(np.isfinite(time[g]))
        new_time = (times[:, None] + time[g, columns]).ravel()
        new_error = (errors[:, None] + error2[g, columns]).ravel()
        parent = np.repeat(np.arange(len(times)), len(columns))
        column = np.tile(columns, len(times))
        bound = _bound(new_time, budget - new_error, position > depth, hull, time, error2)
        alive = np.flatnonzero((new_error <= budget) & (bound < incumbent - 1e-12 * max(1.0, abs(incumbent))))
        if len(alive) == 0:
            return None
        alive = alive[np.lexsort((new_time[alive], new_error[alive]))]
        best = np.minimum.accumulate(new_time[alive])
        keep = np.ones(len(alive), dtype=bool)
        keep[1:] = new_time[alive][1:] < best[:-1]
        alive = alive[keep]
        if len(alive) > _MAX_STATES:
            alive = alive[np.argsort(bound[alive], kind="stable")[:_MAX_STATES]]
        times, errors = new_time[alive], new_error[alive]
        history.append((parent[alive], column[alive]))
    state = int(np.argmin(times))
    choice = np.zeros(groups, dtype=np.int64)
    for depth in range(groups - 1, -1, -1):
        parent, column = history[depth]
        choice[order[depth]] = column[state]
        state = int(parent[state])
    return choice


def _bound(
    used: FloatTable,
    room: FloatTable,
    remaining: npt.NDArray[np.bool_],
    hull: _Hull,
    time: FloatTable,
    error2: FloatTable,
) -> FloatTable:
    """Return the least total time the linear relaxation of the remaining groups allows."""
    rows = np.flatnonzero(remaining)
    base_time = float(time[rows, hull.start[rows]].sum())
    base_error = float(error2[rows, hull.start[rows]].sum())
    steps = remaining[hull.group] if len(hull.group) else np.zeros(0, dtype=bool)
    spent = np.concatenate([[0.0], np.cumsum(hull.spent[steps])])
    saved = np.concatenate([[0.0], np.cumsum(hull.saved[steps])])
    left = room - base_error
    out: FloatTable = used + base_time - np.interp(left, spent, saved)
    return np.where(left < -1e-12 * (1 + abs(base_error)), np.inf, out)


def corners(time: FloatTable, error2: FloatTable, points: int = 64) -> npt.NDArray[np.int64]:
    """Return assignments ``[P, G]`` along the front from least error to least time: its corners, all exactly optimal.

    They are the prefixes of the walk along all groups' hulls, each the fastest assignment of its own error; evenly
    chosen if there are more than ``points``. What lies between two corners is found by :func:`solve`.
    """
    usable = np.where(np.isfinite(time) & np.isfinite(error2), time, np.inf)
    hull = _hull(usable, error2)
    count = len(hull.group) + 1
    kept = np.unique(np.linspace(0, count - 1, min(count, max(2, points))).astype(np.int64))
    out = np.empty((len(kept), len(time)), dtype=np.int64)
    choice, done = hull.start.copy(), 0
    for line, steps in enumerate(kept):
        # a group's steps come in the order of its hull: the last one taken is where it stands
        choice[hull.group[done:steps]] = hull.column[done:steps]
        out[line], done = choice, int(steps)
    return out


def _relaxed(time: FloatTable, error2: FloatTable, budget: float, limits: Sequence[Limit]) -> IntVector | None:
    """Return a fast assignment within all bounds by Lagrange multipliers, or None when none was found."""
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
