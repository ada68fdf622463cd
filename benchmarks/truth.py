"""What a search is scored against: true values by re-measurement under fresh seeds, and a long run for the true front.

Means over few seeds flatter whoever is picked as the best of many, so seeds are added where it matters: four for
whatever could be useful at all, more for what is near the front, all of them for what is nearer still.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from ground_truth import TRUTH_SEEDS, Case

from autoprec.search.beliefs import divergence_model
from autoprec.search.model import Belief, DivergenceModel, Observation
from autoprec.search.pareto import hypervolume, nondominated
from autoprec.search.solver import solve

#: (fresh seeds, factor): so many seeds for what is within this factor of the divergence of a run's own front.
LEVELS = ((4, 1.6), (8, 1.2))
#: Those near the best known front of all.
FRONT_LEVELS = ((4, 1.6), (8, 1.25), (24, 1.08))
#: Divergence at which a trial is hopeless (twenty times the budget): the corner of the hypervolume.
WORST = 0.05

Point = tuple[float, float]


def points_of(case: Case, rows: Iterable[bytes]) -> list[tuple[float, float, bytes]]:
    """Return (step time, true divergence, row) of those that were measured under fresh seeds."""
    found = [(case.time(row), case.truth(row), row) for row in dict.fromkeys(rows)]
    return [point for point in found if math.isfinite(point[1])]


def front_of(case: Case, rows: Iterable[bytes]) -> list[tuple[float, float, bytes]]:
    """Return the non-dominated ones by true values, fastest first."""
    points = points_of(case, rows)
    return [points[i] for i in nondominated([p[:2] for p in points])]


def near(case: Case, rows: Sequence[bytes], value: Callable[[bytes], float], factor: float) -> list[bytes]:
    """Return the rows whose divergence is within a factor of the best at their speed or faster."""
    ordered = sorted(dict.fromkeys(rows), key=lambda row: (case.time(row), value(row)))
    best, out = math.inf, []
    for row in ordered:
        here = value(row)
        if here <= factor * best:
            out.append(row)
        best = min(best, here)
    return out


def refine(
    case: Case,
    rows: Sequence[bytes],
    start: Callable[[bytes], float] | None = None,
    levels: Sequence[tuple[int, float]] = LEVELS,
) -> None:
    """Measure rows under fresh seeds, level by level; ``start`` screens them before the first level."""
    for level, (seeds, factor) in enumerate(levels):
        screen = start if level == 0 and start is not None else case.truth
        kept = list(rows) if level == 0 and start is None else near(case, rows, screen, factor)
        case.measure((row, seed) for row in kept for seed in list(TRUTH_SEEDS)[:seeds])


def refine_run(case: Case, log: Sequence[bytes], seed: int) -> None:
    """Measure what one run tried: what its own trials call hopeless (twice as bad as its front) is left out."""
    refine(case, log, lambda row: case.trial(row, seed))


def settle(case: Case) -> None:
    """Measure the front of everything, and what is nearly on it, under all fresh seeds, until it stays the same."""
    while True:
        close = near(case, [row for row in case.values if case.seeds_of(row)], case.truth, FRONT_LEVELS[-1][1])
        missing = [row for row in close if case.seeds_of(row) < len(TRUTH_SEEDS)]
        if not missing:
            return
        case.measure((row, seed) for row in missing for seed in TRUTH_SEEDS)


def long_run(case: Case, rounds: int, width: int = 48) -> None:
    """Look for the true front: the knapsack fronts of a model of all true values, and single changes around the front.

    Nothing a search may use: it is fitted to means over fresh seeds, hundreds of them.
    """
    rng = np.random.default_rng(0)
    for turn in range(rounds):
        model = _fitted(case)
        fresh = {row for k in range(3) for row in _knapsack_front(case, model.draw(rng, 0.5 * k), width)}
        belief = model.mean()

        def expected(row: bytes, belief: Belief = belief) -> float:
            index = np.frombuffer(row, np.uint8).astype(np.int64)
            return case.truth(row) if case.seeds_of(row) else belief.divergence(index, np.zeros(0), 0.0)

        changed = _changes(case) - set(case.values)
        fresh |= set(near(case, [*changed, *case.values], expected, 1.15)[: 4 * width])
        measured = [row for row in case.values if case.seeds_of(row)]
        refine(case, [*fresh, *measured], expected, FRONT_LEVELS)
        print(f"{case.name}: long run {turn + 1}, {case.trained} trained, {case.cpu_s:.0f} s", flush=True)


def _fitted(case: Case) -> DivergenceModel:
    """Return the model of the 500 best-measured true values."""
    error2 = np.exp(np.mean([np.log(scan.table.error2) for scan in case.scans], axis=0))
    model = divergence_model(case.problem, error2)
    known = sorted((row for row in case.values if case.seeds_of(row)), key=case.seeds_of)[-500:]
    rows = [np.frombuffer(row, np.uint8).astype(np.int64) for row in known]
    model.fit([Observation(i, np.zeros(0), 0.0, case.truth(row)) for i, row in zip(rows, known, strict=True)])
    return model


def _knapsack_front(case: Case, belief: Belief, width: int) -> list[bytes]:
    fastest = np.argmin(case.time_ms, axis=1)
    most = float(belief.error2[np.arange(len(fastest)), fastest].sum())
    found = (solve(case.time_ms, belief.error2, float(b)) for b in np.geomspace(most * 1e-3, most, width))
    return [index.astype(np.uint8).tobytes() for index in found if index is not None]


def _changes(case: Case) -> set[bytes]:
    """Return every single change of a point of the front."""
    out = set()
    for _, _, row in front_of(case, case.values):
        for g, c in zip(*np.nonzero(case.problem.allowed), strict=True):
            changed = np.frombuffer(row, np.uint8).copy()
            changed[g] = c
            out.add(changed.tobytes())
    return out


def corner(case: Case) -> Point:
    """Return the reference point of the hypervolume: a little slower than the slowest uniform assignment."""
    shape = case.time_ms.shape
    slowest = max(case.time(np.full(shape[0], c, dtype=np.uint8).tobytes()) for c in range(shape[1]))
    return slowest * 1.02, math.log10(WORST)


def volume(case: Case, points: Sequence[tuple[float, float, bytes]]) -> float:
    """Return the hypervolume over step time and log10 divergence."""
    return hypervolume([(t, math.log10(max(d, 1e-7))) for t, d, _ in points], corner(case))
