"""Which choice for which group: the multiple-choice knapsack over time, squared error, and further limits.

Squared relative gradient errors of single groups add over a mixed assignment, so "fastest within an error budget" is a
multiple-choice knapsack: one choice per group, times add, errors add, the error is bounded. Its linear relaxation is
solved by walking each group's lower convex hull in order of slope (Sinha and Zoltners, Operations Research 27, 1979);
what the walk leaves unused is filled by a bounded dynamic program over non-dominated partial assignments, which is
exact unless it has to drop states (never on small problems).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from autoprec.tuning.decide.relaxation import solve_relaxed
from autoprec.tuning.decide.tables import FloatTable, IntVector, Limit, PairCosts

__all__ = ["Limit", "PairCosts", "Solution", "corners", "evaluate", "front", "solve"]

_MAX_STATES = 4096


@dataclass(frozen=True, slots=True)
class Solution:
    """One assignment: ``choice`` is a column per group; ``time`` includes pair costs."""

    choice: tuple[int, ...]
    time: float
    error2: float
    memory: float = 0.0


def evaluate(
    choice: Sequence[int] | IntVector, time: FloatTable, error2: FloatTable, pairs: PairCosts | None = None
) -> tuple[float, float]:
    """Return (time, squared error) of an assignment, pair costs included."""
    index = np.asarray(choice)
    rows = np.arange(len(index))
    total = float(time[rows, index].sum())
    for (a, b), cost in (pairs or {}).items():
        total += float(cost[index[a], index[b]])
    return total, float(error2[rows, index].sum())


def solve(
    time: FloatTable,
    error2: FloatTable,
    budget: float,
    *,
    limits: Sequence[Limit] = (),
    pairs: PairCosts | None = None,
) -> IntVector | None:
    """Return the fastest assignment whose squared errors sum to at most ``budget``.

    Args:
        time: ``[G, C]``; infinite where a group does not offer a choice. May be negative (a difference to a baseline).
        error2: ``[G, C]`` >= 0.
        budget: upper bound of the sum of ``error2``; infinity for none.
        limits: further additive bounds, met through Lagrange multipliers (exact on small problems).
        pairs: extra time of two groups' choices together.

    Returns:
        ``[G]`` columns, or None when nothing fits.
    """
    time = np.where(np.isfinite(time) & np.isfinite(error2), time, np.inf)
    combinations = float(np.exp(min(50.0, np.log(np.maximum(np.isfinite(time).sum(axis=1), 1)).sum())))
    if (limits or pairs) and combinations <= 50_000:
        return _enumerate(time, error2, budget, limits, pairs)
    if limits and not pairs:  # most limits do not bind: ask the exact solver first
        free = _knapsack(time, error2, budget)
        rows = np.arange(len(time))
        if free is None or all(float(x.cost[rows, free].sum()) <= x.bound for x in limits):
            return free
    if limits or pairs:
        return solve_relaxed(time, error2, budget, limits=limits, pairs=pairs)
    return _knapsack(time, error2, budget)


def _enumerate(
    time: FloatTable, error2: FloatTable, budget: float, limits: Sequence[Limit], pairs: PairCosts | None
) -> IntVector | None:
    """Try every assignment (small problems with limits or pair costs)."""
    options = [np.flatnonzero(np.isfinite(row)) for row in time]
    grid = np.stack([axis.ravel() for axis in np.meshgrid(*options, indexing="ij")], axis=1).astype(np.int64)
    rows = np.arange(len(time))
    total = time[rows, grid].sum(axis=1)
    for (a, b), cost in (pairs or {}).items():
        total = total + cost[grid[:, a], grid[:, b]]
    fits = error2[rows, grid].sum(axis=1) <= budget * (1 + 1e-12)
    for limit in limits:
        fits &= limit.cost[rows, grid].sum(axis=1) <= limit.bound * (1 + 1e-12)
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
    room = budget * (1 + 1e-12) - used
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
    if len(time) <= 128:
        better = _fill(time, error2, budget * (1 + 1e-12), hull, float(time[rows, choice].sum()))
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


def front(
    time: FloatTable,
    error2: FloatTable,
    memory: FloatTable | None = None,
    *,
    limits: Sequence[Limit] = (),
    pairs: PairCosts | None = None,
    points: int = 24,
) -> list[Solution]:
    """Return the whole front between least error and least time: non-dominated, ordered by falling time.

    Budgets are spread evenly in the logarithm of the squared error between the smallest non-zero and the largest
    useful one, and the least-error assignment is always the first point.
    """
    usable = np.isfinite(time) & np.isfinite(error2)
    masked = np.where(usable, error2, np.inf)
    least = float(masked.min(axis=1).sum())
    fastest = solve(time, error2, np.inf, limits=limits, pairs=pairs)
    if fastest is None:
        return []
    rows = np.arange(len(time))
    most = float(error2[rows, fastest].sum())
    positive = error2[usable & (error2 > 0)]
    low = max(float(positive.min()) if len(positive) else 1e-12, most * 1e-8, 1e-30)
    budgets = [least, *np.geomspace(least + low, max(most, least + low), max(2, points)).tolist()]
    found: list[Solution] = []
    for budget in budgets:
        choice = solve(time, error2, float(budget), limits=limits, pairs=pairs)
        if choice is None:
            continue
        total, error = evaluate(choice, time, error2, pairs)
        held = float(memory[rows, choice].sum()) if memory is not None else 0.0
        if not found or total < found[-1].time - 1e-15:
            found.append(Solution(tuple(int(c) for c in choice), total, error, held))
    return found
