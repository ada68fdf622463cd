"""What a search is scored against: true values by re-measurement under fresh seeds, and a long run for the true front.

Which assignments are good is found out under *truth* seeds: four for whatever could be useful at all, more for what is
near the front, all of them for what is nearer still. The best of thousands of such means are the best partly by luck (a
front picked so loses 4 to 5 % of its hypervolume when it is measured again), so they are first drawn towards an
additive model of all of them, and what was picked, by a strategy's run as for the true front, is then measured anew
under *judge* seeds, and only that is scored.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from autoprec.policy.solver import solve
from autoprec.tuning.decide.pareto import nondominated
from autoprec.tuning.decide.sampler.posterior import DivergenceModel
from autoprec.tuning.decide.sampler.prior import divergence_model
from benchmarks.search.ground_truth import JUDGE_SEEDS, TRUTH_SEEDS, Case

#: Divergence at which a trial is hopeless (twenty times the budget): the corner of the hypervolume.
WORST = 0.05

Point = tuple[float, float]


class Worth:
    """What every assignment is worth by all truth seeds: its own mean, drawn towards a model of all of them.

    In logarithms, with the weights of a normal prior: the model's own misfit against the error of the mean.
    """

    def __init__(self, case: Case, noise: float) -> None:
        rows = [row for row in case.values if case.seeds_of(row)]
        modelled = np.log(by_law(_fitted(case), case, rows))
        measured = np.log([case.truth(row) for row in rows])
        variance = noise**2 / np.array([case.seeds_of(row) for row in rows])
        known = variance <= noise**2 / min(8, case.spec.seeds.front[-1][0])
        known |= not known.any()
        misfit = max(1e-4, float(((measured - modelled)[known] ** 2 - variance[known]).mean()))
        drawn = (measured * misfit + modelled * variance) / (misfit + variance)
        self._values = dict(zip(rows, np.exp(drawn).tolist(), strict=True))

    def __call__(self, row: bytes) -> float:
        """Return the divergence; infinity for an assignment no truth seed has seen."""
        return self._values.get(row, math.inf)


def picked(case: Case, rows: Iterable[bytes], worth: Callable[[bytes], float]) -> list[bytes]:
    """Return the non-dominated rows, fastest first."""
    known = [row for row in dict.fromkeys(rows) if math.isfinite(worth(row))]
    return [known[i] for i in nondominated([(case.time(row), worth(row)) for row in known])]


def judge(case: Case, rows: Iterable[bytes], worth: Callable[[bytes], float], front: Sequence[bytes]) -> None:
    """Measure picked rows under judge seeds: more of them for what is near the front."""
    wanted = list(dict.fromkeys([*front, *rows]))
    many, few = case.spec.seeds.judge
    close = set(near(case, wanted, worth, case.spec.seeds.front[1][1]))
    case.measure((row, seed) for row in wanted for seed in list(JUDGE_SEEDS)[: many if row in close else few])


def judged(case: Case, rows: Sequence[bytes]) -> list[Point]:
    """Return (step time, divergence) of picked rows by their judge seeds, made monotone.

    They were picked as a front, so a slower one that now measures worse is noise: neighbours are pooled (isotonic
    regression of ln divergence over step time) rather than the luckier one taken.
    """
    ordered = sorted((case.time(row), case.judged(row)) for row in rows)
    pools: list[list[float]] = []  # sum of logarithms, count
    for _, value in ordered:
        pools.append([math.log(value), 1.0])
        while len(pools) > 1 and pools[-1][0] / pools[-1][1] > pools[-2][0] / pools[-2][1]:
            total, count = pools.pop()
            pools[-1] = [pools[-1][0] + total, pools[-1][1] + count]
    level = [math.exp(total / count) for total, count in pools for _ in range(int(count))]
    return [(time, value) for (time, _), value in zip(ordered, level, strict=True)]


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
    levels: Sequence[tuple[int, float]] = (),
) -> None:
    """Measure rows under fresh seeds, level by level; ``start`` screens them before the first level."""
    for level, (seeds, factor) in enumerate(levels or case.spec.seeds.levels):
        screen = start if level == 0 and start is not None else case.truth
        kept = list(rows) if level == 0 and start is None else near(case, rows, screen, factor)
        case.measure((row, seed) for row in kept for seed in list(TRUTH_SEEDS)[:seeds])


def refine_run(case: Case, log: Sequence[bytes], seed: int) -> None:
    """Measure what one run tried: what its own trials call hopeless (twice as bad as its front) is left out."""
    refine(case, log, lambda row: case.trial(row, seed))


def settle(case: Case) -> None:
    """Measure the front of everything, and what is nearly on it, under all fresh seeds, until it stays the same."""
    while True:
        seeds, factor = case.spec.seeds.front[-1]
        close = near(case, [row for row in case.values if case.seeds_of(row)], case.truth, factor)
        missing = [row for row in close if case.seeds_of(row) < seeds]
        if not missing:
            return
        case.measure((row, seed) for row in missing for seed in list(TRUTH_SEEDS)[:seeds])


def long_run(case: Case, rounds: int, width: int = 48) -> None:
    """Look for the true front: the knapsack fronts of a model of all true values, and single changes around the front.

    Nothing a search may use: it is fitted to means over fresh seeds, hundreds of them.
    """
    rng = np.random.default_rng(0)
    for turn in range(rounds):
        model = _fitted(case)
        squares = model.law()[0]
        shaken = [squares * rng.lognormal(0.0, 0.25 * k, squares.shape) for k in range(3)]
        fresh = {row for one in shaken for row in _knapsack_front(case, one, width)}

        def expected(row: bytes, model: DivergenceModel = model) -> float:
            if case.seeds_of(row):
                return case.truth(row)
            return float(by_law(model, case, [row])[0])

        changed = _changes(case) - set(case.values)
        fresh |= set(near(case, [*changed, *case.values], expected, 1.15)[: 4 * width])
        measured = [row for row in case.values if case.seeds_of(row)]
        refine(case, [*fresh, *measured], expected, case.spec.seeds.front)
        print(f"{case.name}: long run {turn + 1}, {case.trained} trained, {case.cpu_s:.0f} s", flush=True)


def by_law(model: DivergenceModel, case: Case, rows: Sequence[bytes]) -> np.ndarray[Any, Any]:
    """Return the divergence ``[N]`` of rows by the most likely law of a model."""
    squares, _, parameter = model.law()
    points = case.points(rows)
    return np.exp(points.features @ parameter) * np.sqrt(np.maximum(points.pick(squares).sum(axis=1), 1e-30))


def _fitted(case: Case) -> DivergenceModel:
    """Return the model of the 500 best-measured true values."""
    error2 = np.exp(np.mean([np.log(scan.table.error2) for scan in case.scans], axis=0))
    model = divergence_model(case.problem, error2)
    known = sorted((row for row in case.values if case.seeds_of(row)), key=case.seeds_of)[-500:]
    # each a mean of its own: no two share a seed's luck
    model.fit(case.points(known), np.array([case.truth(row) for row in known]), np.arange(len(known)))
    return model


def _knapsack_front(case: Case, squares: np.ndarray[Any, Any], width: int) -> list[bytes]:
    """Return the fronts under every value of the parameters, ``width`` points in all."""
    fastest = np.argmin(case.time_ms, axis=1)
    allowed = np.where(np.isfinite(squares), squares, 0.0)
    most = float(allowed[np.arange(len(fastest)), fastest].sum())
    options = list(itertools.product(*case.problem.parameters.values()))
    out = []
    for k, b in enumerate(np.geomspace(most * 1e-3, most, max(width, len(options)))):
        index = solve(case.time_ms, squares, float(b))
        if index is not None:
            for values in options[k % len(options) :: max(1, len(options) // 2)]:
                chosen = dict(zip(case.problem.parameters, values, strict=True))
                out.append(case.row(case.problem.from_indices(index, chosen)))
    return out


def _changes(case: Case) -> set[bytes]:
    """Return every single change of a point of the front."""
    out = set()
    sizes = [len(values) for values in case.problem.parameters.values()]
    groups = len(case.problem.groups)
    single = [*zip(*np.nonzero(case.problem.allowed), strict=True)]
    single += [(groups + k, c) for k, size in enumerate(sizes) for c in range(size)]
    for row in picked(case, case.values, case.truth):
        for g, c in single:
            changed = np.frombuffer(row, np.uint8).copy()
            changed[g] = c
            out.add(changed.tobytes())
    return out


def hypervolume(points: Sequence[Sequence[float]], reference: Sequence[float]) -> float:
    """Return the area dominated by two-dimensional points and bounded by a reference point (both minimised)."""
    inside = [p for p in points if all(a < b for a, b in zip(p, reference, strict=True))]
    area, height = 0.0, reference[1]
    for i in nondominated(inside):
        x, y = inside[i][0], inside[i][1]
        area += (reference[0] - x) * (height - y)
        height = y
    return area


def corner(case: Case) -> Point:
    """Return the reference point of the hypervolume: a little slower than the slowest uniform assignment."""
    slowest = max(case.time(case.row(case.problem.params_of(name))) for name in case.problem.choice_names)
    return slowest * 1.02, math.log10(WORST)


def volume(case: Case, points: Sequence[Point]) -> float:
    """Return the hypervolume over step time and log10 divergence."""
    return hypervolume([(t, math.log10(max(d, 1e-7))) for t, d in points], corner(case))
