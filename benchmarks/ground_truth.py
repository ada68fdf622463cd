"""Real training runs as the objective of search_quality.py, kept in a table so that every strategy replays them.

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
from autoprec.graph.report import GemmCall, GraphReport, Layer
from autoprec.policy.space import Choice, space_from_dict
from autoprec.precision.hardware import target
from autoprec.tuning.decide.problem import Problem
from autoprec.tuning.decide.sampler.prior import Prior
from autoprec.tuning.decide.scan import scan_batches
from autoprec.tuning.decide.table import SensitivityTable, plan_probes

if TYPE_CHECKING:
    from replicas import Replicas

STEPS, SCORED, SCAN_STEP = 14, 7, 6
SCALE = "width=256,tokens=256"
RESULTS = Path(__file__).parent / "results"
#: A run of a search sees one of the first seeds. The best of thousands of means over the truth seeds is best partly by
#: luck, so what was picked by them is judged by seeds of its own.
TRIAL_SEEDS, TRUTH_SEEDS, JUDGE_SEEDS = range(8), range(8, 32), range(32, 56)
#: Replicas trained at once.
BATCH = 256
_B200 = ["bf16", "mxfp8", "nvfp4_plain", "nvfp4_plain/wgrad=mxfp8"]
_H100 = ["bf16", "fp8_rowwise", "fp8_tensorwise", "fp8_rowwise/wgrad=bf16"]
#: The cases that are reported, and the two that the method was developed on.
CASES = {
    "gpt-b200": ("gpt", "b200", _B200),
    "vit-h100": ("vit", "h100", _H100),
    "gpt-h100": ("gpt", "h100", _H100),
    "vit-b200": ("vit", "b200", _B200),
}
REPORTED = ("gpt-b200", "vit-h100")
WIDTH, BLOCKS = 32, 4


def recorded(kind: str) -> GraphReport:
    """Return the graph report of a replica's model: its GEMMs, one group per layer."""
    d, tokens, outputs = WIDTH, 64, 96 if kind == "gpt" else 32
    shapes = {}
    for b in range(BLOCKS):
        shapes |= {f"h.{b}.attn.qkv": (3 * d, d), f"h.{b}.attn.proj": (d, d)}
        shapes |= {f"h.{b}.mlp.up": (4 * d, d), f"h.{b}.mlp.down": (d, 4 * d)}
    layers = []
    for name, (n, k) in {**shapes, "head": (outputs, d)}.items():
        if name == "head":  # stands for a large vocabulary: no scale reaches it, and at 96 outputs no GPU gains there
            n = 32768
        gemms = (GemmCall("fprop", tokens, k, n), GemmCall("dgrad", tokens, n, k), GemmCall("wgrad", n, tokens, k))
        flags = ("head",) if name == "head" else ()
        flops = {gemm.role: gemm.flops for gemm in gemms}
        layers.append(Layer(name, "Linear", "linear", name, name, gemms, n * k, True, "", flags, flops, "float32"))
    total = sum(layer.total_flops for layer in layers)
    info = {"class": kind, "parameters": sum(x.parameters for x in layers), "fingerprint": ""}
    return GraphReport(info, tuple(layers), (), {x.name: (x.name,) for x in layers}, total, 1.0, memory={})


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
    kind: str
    problem: Problem
    time_ms: np.ndarray[Any, Any]
    base_ms: float
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
        kind, device, choices = CASES[name]
        document = {"schema": "autoprec.space/1", "name": name, "baseline": "bf16", "activations": ["bf16"]}
        space = space_from_dict({**document, "choices": [{"match": "*", "choices": choices}]})
        report = recorded(kind)
        cost = CostModel(report, target(device), scale=CostScale.parse(SCALE))
        problem = Problem.build(report, space, cost.can_run)
        if any(len(group.choices) != len(choices) for group in problem.groups):
            raise SystemExit(f"{name}: refused choices {problem.refused}")
        path = RESULTS / f"search_quality_{name}.npz"
        if path.exists():  # the modelled times of the stored run too: a later cost model must not shift the target
            with np.load(path) as stored:
                return cls._restored(name, kind, problem, {key: stored[key] for key in stored.files})
        recipes = space.all_recipes
        times = problem.table(
            lambda g, c: cost.layer_time_ms(g.name, Choice.parse(c).plan(recipes), activations="bf16")
        )
        whole = cost.estimate(problem.plans(problem.params_of("bf16")), activations="bf16").time_ms
        case = cls(name, kind, problem, times, float(whole - times[:, problem.choice_names.index("bf16")].sum()))
        case.scans = [case.scan(seed) for seed in TRIAL_SEEDS]
        return case

    @classmethod
    def _restored(cls, name: str, kind: str, problem: Problem, stored: dict[str, Any]) -> Case:
        case = cls(name, kind, problem, stored["time_ms"], float(stored["base_ms"]))
        scans = zip(stored["error2"], stored["checks"], stored["floor"], stored["one_pass"], strict=True)
        for error2, checks, floor, one_pass in scans:
            groups = tuple(group.name for group in problem.groups)
            table = SensitivityTable(groups, problem.choice_names, error2)
            case.scans.append(Scan(table, checks, float(floor), one_pass))
        rows = zip(stored["assignment"], stored["divergence"], strict=True)
        case.values = {row.tobytes(): values.astype(np.float64) for row, values in rows}
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
        """Return the row of params: a column per group."""
        return self.problem.indices(params).astype(np.uint8).tobytes()

    def params(self, row: bytes) -> dict[str, Any]:
        """Return the params of a row."""
        return self.problem.from_indices(np.frombuffer(row, dtype=np.uint8).astype(np.int64), {})

    @property
    def baseline(self) -> bytes:
        """The row of the baseline everywhere: the 16-bit run."""
        return self.row(self.problem.params_of(self.problem.baseline))

    # --- what a point costs and is worth ------------------------------------------------------------------------------
    def time(self, row: bytes) -> float:
        """Return the modelled step time in ms of an assignment."""
        index = np.frombuffer(row, dtype=np.uint8)
        return self.base_ms + float(self.time_ms[np.arange(len(index)), index].sum())

    def prior(self, seed: int) -> Prior:
        """Return what a search under a trial seed knows at its start."""
        return Prior(self.time_ms, self.scans[seed].table.error2, self.base_ms, time_noise=1e-4, time_trust=0.001)

    def trial(self, row: bytes, seed: int) -> float:
        """Return what a trial of this assignment measures under a trial seed."""
        return float(self.values[row][seed])

    def truth(self, row: bytes) -> float:
        """Return the mean divergence over the truth seeds measured so far; infinity where there are none."""
        return self._mean(row, TRUTH_SEEDS)

    def judged(self, row: bytes) -> float:
        """Return the mean divergence over the judge seeds measured so far; infinity where there are none."""
        return self._mean(row, JUDGE_SEEDS)

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
            values = self.values.setdefault(row, np.full(JUDGE_SEEDS.stop, np.nan))
            if math.isnan(values[seed]):
                new.append((row, seed))
        new.sort(key=lambda pair: pair[1])
        for start in range(0, len(new), BATCH):
            self._train(new[start : start + BATCH])

    def _train(self, pairs: Sequence[tuple[bytes, int]]) -> None:
        began = time.process_time()
        seeds = tuple(sorted({seed for _, seed in pairs}))
        model = self._model(seeds)
        choices = ["keep", *self.problem.choice_names]
        unknown = [seed for seed in seeds if seed not in self._losses]
        if unknown:
            reference = np.zeros((len(unknown), len(self.problem.groups)), dtype=np.int64)
            losses, _ = model.train(reference, np.array([seeds.index(s) for s in unknown]), choices, STEPS)
            self._losses |= dict(zip(unknown, losses, strict=True))
        rows = np.array([np.frombuffer(row, dtype=np.uint8) for row, _ in pairs]).astype(np.int64) + 1
        losses, _ = model.train(rows, np.array([seeds.index(seed) for _, seed in pairs]), choices, STEPS)
        for (row, seed), mine in zip(pairs, losses, strict=True):
            self.values[row][seed] = gap(mine, self._losses[seed])
        self.trained += len(pairs)
        self.cpu_s += time.process_time() - began

    def _model(self, seeds: tuple[int, ...]) -> Replicas:
        import torch
        from replicas import Replicas

        torch.set_num_threads(1)
        if seeds not in self._models:
            self._models[seeds] = Replicas(self.kind, seeds, width=WIDTH, blocks=BLOCKS)
        return self._models[seeds]

    def scan(self, seed: int, checks: int = 80) -> Scan:
        """Measure the table as the product does (on as many batches, a step apart), and the noise floor.

        The checks are random assignments: half of them draw every group's choice evenly, the others with shares of
        their own (from a flat Dirichlet), so that the whole range between the uniform assignments is covered.
        """
        model = self._model((seed,))
        choices = ["keep", *self.problem.choice_names]
        count = len(self.problem.groups)
        reference, one = np.zeros((1, count), dtype=np.int64), np.zeros(1, dtype=np.int64)
        whole, _ = model.train(reference, one, choices, STEPS)
        benign, _ = model.train(reference, one, choices, STEPS, perturbed=True)
        probes = [p for p in plan_probes(self.problem) if not p.id.startswith(("mixed", "parameter"))]
        rows = np.zeros((len(probes) + checks, count), dtype=np.int64)
        for row, probe in zip(rows, probes, strict=False):
            groups, _, choice = probe.id.partition("|")
            row[[int(g) for g in groups.split(",")]] = choices.index(choice)
        rng = np.random.default_rng(seed)
        for number, row in enumerate(rows[len(probes) :]):
            shares = rng.dirichlet(np.ones(len(choices) - 1)) if number % 2 else None
            row[:] = rng.choice(len(choices) - 1, count, p=shares) + 1
        squares, one_pass = [], []
        for step in range(SCAN_STEP, SCAN_STEP + scan_batches(recorded(self.kind))):
            _, weights = model.train(reference, one, choices, STEPS, stop=step)
            squares.append(_squared_errors(model, weights, step, rows, choices))
            one_pass.append(model.one_pass_scores(weights, step, choices))
        errors = np.sqrt(np.mean(squares, axis=0))
        answers = [{"id": p.id, "gradient_error": float(e)} for p, e in zip(probes, errors, strict=False)]
        table = SensitivityTable.from_probes(self.problem, {"probes": answers})
        predicted = [math.sqrt(table.error2[np.arange(count), row - 1].sum()) for row in rows[len(probes) :]]
        pairs = np.array([predicted, errors[len(probes) :]]).T
        return Scan(table, pairs, gap(benign[0], whole[0]), np.mean(one_pass, axis=0)[:, 1:])


def _squared_errors(
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
    """Return the mean relative gap of the last losses, as ``objectives.divergence`` does; at most 10."""
    value = float(((losses - reference).abs() / reference)[-SCORED:].mean())
    return min(value, 10.0) if math.isfinite(value) else 10.0
