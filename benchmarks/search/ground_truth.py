"""Real training runs as the objective of quality.py, kept in a table so that every strategy replays them.

The table maps (assignment, seed) to a divergence: the mean relative loss gap to the float32 run of the same seed. What
a *trial* of a search sees is one seed's value, as in the product, where single short trials are noisy. What an
assignment is *worth* is the mean over other, fresh seeds: some to find out which assignments are good (*truth* seeds),
and others, used for nothing else, to say how good those are (*judge* seeds).
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from autoprec.cost import CostModel, CostScale
from autoprec.policy import glob_matches
from autoprec.policy.space import Choice, space_from_dict
from autoprec.precision.hardware import target
from autoprec.trial.protocol import GradientErrors, ProbeResult
from autoprec.tuning.decide.problem import GroupVariable, Problem
from autoprec.tuning.decide.sampler.posterior import Points
from autoprec.tuning.decide.sampler.prior import Prior, features_of, points_of
from autoprec.tuning.decide.scan import SensitivityScan, scan_batches
from autoprec.tuning.decide.table import SensitivityTable, mixed_params
from benchmarks.search.cases import CASES, Spec, parameter_times, recorded

if TYPE_CHECKING:
    from benchmarks.search.replicas import Replicas

SCAN_STEP = 6
RESULTS = Path(__file__).resolve().parents[1] / "results"
#: A run of a search sees one of the first seeds. The best of thousands of means over the truth seeds is best partly by
#: luck, so what was picked by them is judged by seeds of its own; what was adopted, by 48 that it never saw.
TRIAL_SEEDS, TRUTH_SEEDS, JUDGE_SEEDS, FRESH_SEEDS = range(8), range(8, 32), range(32, 56), range(56, 80)
#: Passes of a scan, and passes that it may take where it can be complete: the product's, for 30 trials of 23 steps.
SCAN_PASSES, SCAN_ROOM = 60, 138


@dataclass(frozen=True)
class Scan:
    """What the product measures before its first trial, under one trial seed.

    ``checks`` are (predicted, measured) gradient errors of random assignments; ``floor`` is the noise floor.
    ``one_pass`` ``[G, C]`` is what ModelOpt measures instead, for the alternative of that name.
    """

    table: SensitivityTable
    checks: np.ndarray[Any, Any]
    floor: float
    one_pass: np.ndarray[Any, Any]


@dataclass
class Case:
    """One problem with its real objective; ``values`` maps an assignment's bytes to one divergence per seed."""

    name: str
    spec: Spec
    problem: Problem
    time_ms: np.ndarray[Any, Any]
    base_ms: float
    effects_ms: dict[tuple[str, Any], float] = field(default_factory=dict)
    scans: list[Scan] = field(default_factory=list)
    values: dict[bytes, np.ndarray[Any, Any]] = field(default_factory=dict)
    logs: dict[str, np.ndarray[Any, Any]] = field(default_factory=dict)
    trained: int = 0
    cpu_s: float = 0.0
    _models: dict[tuple[int, ...], Any] = field(default_factory=dict)
    _losses: dict[int, Any] = field(default_factory=dict)

    # --- storage ----------------------------------------------------------------------------------------------------
    @classmethod
    def load(cls, name: str) -> Case:
        """Build a case and read its stored table; scan its sensitivities where none are stored."""
        spec = CASES[name]
        document = {"schema": "autoprec.space/1", "name": name, "baseline": "bf16", "activations": ["bf16"]}
        document |= {"choices": [{"match": glob, "choices": list(choices)} for glob, choices in spec.rules.items()]}
        document |= {"optimizer": {k: list(v) for k, v in spec.optimizer.items()}}
        document |= {"communication": {k: list(v) for k, v in spec.communication.items()}}
        space = space_from_dict(document)
        report = recorded(spec)
        cost = CostModel(report, target(spec.device), scale=CostScale.parse(spec.scale))
        problem = Problem.build(report, space, cost.can_run)
        if problem.refused:
            raise SystemExit(f"{name}: refused choices {problem.refused}")
        path = RESULTS / f"search_quality_{name}.npz"
        if path.exists():  # the modelled times of the stored run too: a later cost model must not shift the target
            with np.load(path) as stored:
                return cls._restored(name, spec, problem, {key: stored[key] for key in stored.files})
        recipes = space.all_recipes

        def milliseconds(group: GroupVariable, choice: str) -> float:
            less = next((factor for glob, factor in spec.small.items() if glob_matches(glob, group.name)), 1.0)
            return less * cost.layer_time_ms(group.name, Choice.parse(choice).plan(recipes), activations="bf16")

        times = problem.table(milliseconds)
        baseline = problem.params_of("bf16")
        whole = cost.estimate(problem.plans(baseline), activations="bf16").time_ms
        inside = [cost.layer_time_ms(n, plan, activations="bf16") for n, plan in problem.plans(baseline).items()]
        effects = parameter_times(spec, cost, cost.estimate({}, activations="bf16").time_ms)
        # what a parameter's default takes is part of every step: an all-reduce of float32 gradients
        sent = -sum(min((ms for (n, _), ms in effects.items() if n == name), default=0.0) for name in _sent(spec))
        case = cls(name, spec, problem, times, float(whole - sum(inside)) + sent * 4 / 3, effects)
        case.scans = [case.scan(seed) for seed in TRIAL_SEEDS]
        return case

    @classmethod
    def _restored(cls, name: str, spec: Spec, problem: Problem, stored: dict[str, Any]) -> Case:
        case = cls(name, spec, problem, stored["time_ms"], float(stored["base_ms"]))
        if "effects_ms" in stored:
            case.effects_ms = dict(zip(features_of(problem), stored["effects_ms"].tolist(), strict=True))
        scans = zip(stored["error2"], stored["checks"], stored["floor"], stored["one_pass"], strict=True)
        for error2, checks, floor, one_pass in scans:
            groups = tuple(group.name for group in problem.groups)
            table = SensitivityTable(groups, problem.choice_names, error2)
            case.scans.append(Scan(table, checks, float(floor), one_pass))
        for row, values in zip(stored["assignment"], stored["divergence"], strict=True):
            case.values[row.tobytes()] = np.full(FRESH_SEEDS.stop, np.nan)
            case.values[row.tobytes()][: len(values)] = values
        rows = list(case.values)
        for key in stored:
            if key.startswith("log:"):
                case.logs[key[4:]] = np.array([[rows[i] for i in run] for run in stored[key]], dtype=object)
            elif key.startswith("ms:"):
                case.logs[key] = stored[key]
        return case

    def save(self) -> None:
        """Store the table, the scans, and what every run of every strategy asked."""
        RESULTS.mkdir(exist_ok=True)
        rows = sorted(self.values)
        position = {row: i for i, row in enumerate(rows)}
        columns: dict[str, Any] = {
            "assignment": np.array([np.frombuffer(row, dtype=np.uint8) for row in rows]),
            "divergence": np.array([self.values[row] for row in rows], dtype=np.float32),
            "time_ms": self.time_ms,
            "base_ms": np.float64(self.base_ms),
            "effects_ms": np.array([self.effects_ms[f] for f in features_of(self.problem)], dtype=np.float64),
            "error2": np.array([scan.table.error2 for scan in self.scans]),
            "checks": np.array([scan.checks for scan in self.scans], dtype=np.float32),
            "floor": np.array([scan.floor for scan in self.scans]),
            "one_pass": np.array([scan.one_pass for scan in self.scans]),
        }
        for key, log in self.logs.items():
            if key.startswith("ms:"):
                columns[key] = log
            else:
                columns[f"log:{key}"] = np.array([[position[row] for row in run] for run in log], dtype=np.int32)
        path = RESULTS / f"search_quality_{self.name}.npz"
        np.savez_compressed(path.with_suffix(".tmp.npz"), **columns)
        path.with_suffix(".tmp.npz").replace(path)

    # --- points -------------------------------------------------------------------------------------------------------
    def row(self, params: Mapping[str, Any]) -> bytes:
        """Return the row of params: a column per group, then the position of every parameter's value."""
        values = [v.index(self.problem.value(params, name)) for name, v in self.problem.parameters.items()]
        return np.array([*self.problem.indices(params), *values], dtype=np.uint8).tobytes()

    def params(self, row: bytes) -> dict[str, Any]:
        """Return the params of a row."""
        index, columns = self.split(row)
        chosen = {n: v[c] for (n, v), c in zip(self.problem.parameters.items(), columns, strict=True)}
        return self.problem.from_indices(index, chosen)

    def split(self, row: bytes) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Return the columns of the groups ``[G]`` and of the parameters ``[K]``."""
        whole = np.frombuffer(row, dtype=np.uint8).astype(np.int64)
        return whole[: len(self.problem.groups)], whole[len(self.problem.groups) :]

    def points(self, rows: Sequence[bytes]) -> Points:
        """Return rows as the models of a search have them."""
        return points_of(self.problem, [self.params(row) for row in rows], lambda _params: 0.0)

    @property
    def baseline(self) -> bytes:
        """The row of the baseline everywhere: the 16-bit run."""
        return self.row(self.problem.params_of(self.problem.baseline))

    # --- what a point costs and is worth ------------------------------------------------------------------------------
    def time(self, row: bytes) -> float:
        """Return the modelled step time in ms of an assignment."""
        index, columns = self.split(row)
        effects = 0.0
        for (name, values), column in zip(self.problem.parameters.items(), columns, strict=True):
            effects += self.effects_ms.get((name, values[column]), 0.0)
        return self.base_ms + float(self.time_ms[np.arange(len(index)), index].sum()) + effects

    def prior(self, seed: int) -> Prior:
        """Return what a search under a trial seed knows at its start."""
        table = self.scans[seed].table.error2
        effects = self.effects_ms
        return Prior(self.time_ms, table, self.base_ms, parameter_time_ms=effects, time_trust=0.001)

    def trial(self, row: bytes, seed: int) -> float:
        """Return what a trial of this assignment measures under a trial seed."""
        return float(self.values[row][seed])

    def truth(self, row: bytes) -> float:
        """Return the mean divergence over the truth seeds measured so far; infinity where there are none."""
        return self._mean(row, TRUTH_SEEDS)

    def judged(self, row: bytes) -> float:
        """Return the mean divergence over the judge seeds measured so far; infinity where there are none."""
        return self._mean(row, JUDGE_SEEDS)

    def fresh(self, row: bytes) -> float:
        """Return the mean divergence over 48 seeds that no search sees, measured where it was not."""
        self.measure((row, seed) for seed in (*JUDGE_SEEDS, *FRESH_SEEDS))
        return self._mean(row, range(JUDGE_SEEDS.start, FRESH_SEEDS.stop))

    def _mean(self, row: bytes, seeds: range) -> float:
        values = self.values.get(row)
        known = values[seeds.start : seeds.stop] if values is not None else np.zeros(0)
        known = known[np.isfinite(known)]
        return float(known.mean()) if len(known) else math.inf

    def seeds_of(self, row: bytes) -> int:
        """Return how many truth seeds an assignment was measured under."""
        values = self.values.get(row)
        return 0 if values is None else int(np.isfinite(values[TRUTH_SEEDS.start : TRUTH_SEEDS.stop]).sum())

    # --- training -----------------------------------------------------------------------------------------------------
    def measure(self, wanted: Iterable[tuple[bytes, int]]) -> None:
        """Train every (assignment, seed) that is not in the table yet."""
        new = []
        for row, seed in dict.fromkeys(wanted):
            values = self.values.setdefault(row, np.full(FRESH_SEEDS.stop, np.nan))
            if math.isnan(values[seed]):
                new.append((row, seed))
        new.sort(key=lambda pair: pair[1])
        for start in range(0, len(new), self.spec.seeds.batch):
            self._train(new[start : start + self.spec.seeds.batch])

    def _train(self, pairs: Sequence[tuple[bytes, int]]) -> None:
        began = time.process_time()
        seeds = tuple(sorted({seed for _, seed in pairs}))
        model = self.model(seeds)
        choices = ["keep", *self.problem.choice_names]
        unknown = [seed for seed in seeds if seed not in self._losses]
        if unknown:
            columns = len(self.problem.groups) + len(self.problem.parameters)
            reference = np.zeros((len(unknown), columns), dtype=np.int64)
            losses, _ = model.train(reference, np.array([seeds.index(s) for s in unknown]), choices, self.spec.steps)
            self._losses |= dict(zip(unknown, losses, strict=True))
        rows = np.array([np.frombuffer(row, dtype=np.uint8) for row, _ in pairs]).astype(np.int64)
        rows[:, : len(self.problem.groups)] += 1
        losses, _ = model.train(rows, np.array([seeds.index(seed) for _, seed in pairs]), choices, self.spec.steps)
        for (row, seed), mine in zip(pairs, losses, strict=True):
            self.values[row][seed] = gap(mine, self._losses[seed])
        self.trained += len(pairs)
        self.cpu_s += time.process_time() - began

    def model(self, seeds: tuple[int, ...]) -> Replicas:
        import torch

        torch.set_num_threads(1)
        if seeds not in self._models:
            self._models[seeds] = self.spec.replicas(seeds)
        return self._models[seeds]

    def scan(self, seed: int, checks: int = 60) -> Scan:
        """Measure the table as the product does (its own scan, on as many batches), and the noise floor.

        The checks are random assignments: half of them draw every group's choice evenly, the others with shares of
        their own (from a flat Dirichlet), so that the whole range between the uniform assignments is covered.
        """
        model, problem, steps = self.model((seed,)), self.problem, self.spec.steps
        choices = ["keep", *problem.choice_names]
        count = len(problem.groups)
        reference, one = np.zeros((1, count + len(problem.parameters)), dtype=np.int64), np.zeros(1, dtype=np.int64)
        whole, _ = model.train(reference, one, choices, steps)
        benign, _ = model.train(reference, one, choices, steps, perturbed=True)
        scan = SensitivityScan(problem, SCAN_PASSES, SCAN_ROOM, scan_batches(problem.report))
        at = []
        for step in range(SCAN_STEP, SCAN_STEP + scan.batches):
            _, weights = model.train(reference, one, choices, steps, stop=step)
            at.append((weights, step))
        while probes := scan.next_round():
            rows = np.array([_probed(problem, probe.id, choices) for probe in probes])
            for_each = [np.sqrt(squared_errors(model, weights, step, rows, choices)) for weights, step in at]
            scan.add(*(_answer([probe.id for probe in probes], errors) for errors in for_each))
        table = scan.table()
        rows = self.checks(np.random.default_rng(seed), checks)
        errors = np.sqrt(np.mean([squared_errors(model, *here, rows, choices) for here in at], axis=0))
        predicted = np.sqrt([table.error2[np.arange(count), row - 1].sum() for row in rows])
        one_pass = np.mean([model.one_pass_scores(*here, choices) for here in at], axis=0)[:, 1:]
        one_pass = np.where(problem.allowed, one_pass, np.inf)
        return Scan(table, np.array([predicted, errors]).T, gap(benign[0], whole[0]), one_pass)

    def checks(self, rng: np.random.Generator, checks: int) -> np.ndarray[Any, Any]:
        """Return random assignments ``[checks, G]``, their columns counted from 1."""
        allowed = self.problem.allowed
        rows = np.zeros((checks, len(allowed)), dtype=np.int64)
        for number, row in enumerate(rows):
            shares = rng.dirichlet(np.ones(allowed.shape[1])) if number % 2 else np.ones(allowed.shape[1])
            for g, offered in enumerate(allowed):
                weights = np.where(offered, shares, 0.0)
                row[g] = rng.choice(len(shares), p=weights / weights.sum()) + 1
        return rows


def _answer(ids: Sequence[str], errors: np.ndarray[Any, Any]) -> GradientErrors:
    return GradientErrors(tuple(ProbeResult(i, float(e)) for i, e in zip(ids, errors, strict=True)))


def _sent(spec: Spec) -> list[str]:
    return [f"communication.{name}" for name in spec.communication]


def _probed(problem: Problem, probe: str, choices: Sequence[str]) -> np.ndarray[Any, Any]:
    """Return the assignment ``[G]`` of a probe; what a parameter's probe changes is not part of these models."""
    row = np.zeros(len(problem.groups), dtype=np.int64)
    head, _, tail = probe.partition("|")
    if head == "mixed":
        params = mixed_params(problem, int(tail))
        return np.array([choices.index(params[f"layer:{group.name}"]) for group in problem.groups])
    if head != "parameter":
        row[[int(g) for g in head.split(",")]] = choices.index(tail)
    return row


def squared_errors(
    model: Replicas, weights: Any, step: int, rows: np.ndarray[Any, Any], choices: Sequence[str]
) -> np.ndarray[Any, Any]:
    """Return the squared relative gradient errors of assignments ``[N, G]``, the first column of choices as truth."""
    clean = model.gradients(weights, step, np.zeros_like(rows[:1]), choices)[0]
    out: list[float] = []
    for start in range(0, len(rows), 64):
        grads = model.gradients(weights, step, rows[start : start + 64], choices)
        out += ((grads - clean).square().sum(1) / clean.square().sum()).tolist()
    return np.array(out)


def gap(losses: Any, reference: Any) -> float:
    """Return the mean relative gap of the last half of the losses, as the product's divergence does; at most 10."""
    value = float(((losses - reference).abs() / reference)[-(len(reference) // 2) :].mean())
    return min(value, 10.0) if math.isfinite(value) else 10.0
