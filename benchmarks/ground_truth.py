"""Real training runs as the objective of search_quality.py, kept in a table so that every strategy replays it."""

from __future__ import annotations

import math
import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from replicas import Replicas

from autoprec.cost import CostModel, CostScale
from autoprec.graph.report import GemmCall, GraphReport, Layer
from autoprec.hardware import target
from autoprec.search.problem import Problem
from autoprec.search.sampler import Prior
from autoprec.search.sensitivity import SensitivityTable, plan_probes
from autoprec.space import space_from_dict

STEPS, SCORED, SCAN_STEP, BATCH = 14, 7, 6, 64
SCALE = "width=256,tokens=256"
RESULTS = Path(__file__).parent / "results"
CASES = {
    "gpt-b200": ("gpt", "b200", ["bf16", "mxfp8", "nvfp4_plain", "nvfp4_plain/wgrad=mxfp8"]),
    "vit-h100": ("vit", "h100", ["bf16", "fp8_rowwise", "fp8_tensorwise", "fp8_rowwise/wgrad=bf16"]),
}


def recorded(model: Replicas) -> GraphReport:
    """Return the graph report of a replica's model: its GEMMs, one group per layer."""
    tokens, layers = model.batch * model.tokens, []
    for name in model.groups:
        n, k = model.initial[name].shape
        if name == "head":  # stands for a large vocabulary: no scale reaches it, and at 96 outputs no GPU gains there
            n = 32768
        gemms = (GemmCall("fprop", tokens, k, n), GemmCall("dgrad", tokens, n, k), GemmCall("wgrad", n, tokens, k))
        flags = ("head",) if name == "head" else ()
        flops = {gemm.role: gemm.flops for gemm in gemms}
        layers.append(Layer(name, "Linear", "linear", name, name, gemms, n * k, True, "", flags, flops, "float32"))
    total = sum(layer.total_flops for layer in layers)
    info = {"class": model.kind, "parameters": sum(x.parameters for x in layers), "fingerprint": ""}
    groups = {name: (name,) for name in model.groups}
    return GraphReport(info, tuple(layers), (), groups, total, 1.0, memory={})


_WORKER: dict[str, Any] = {}


def _measure(rows: Any) -> list[float]:
    case = _WORKER["case"]
    return list(case.measure(rows, case.model))


@dataclass
class Case:
    """One problem with its real objective.

    ``table`` maps an assignment (bytes of columns) to its measured divergence at the script's own seed.
    """

    name: str
    model: Replicas
    problem: Problem
    prior: Prior
    scan: SensitivityTable
    checks: list[tuple[float, float]]
    table: dict[bytes, float] = field(default_factory=dict)
    trained: int = 0
    cpu_s: float = 0.0

    @classmethod
    def load(cls, name: str) -> Case:
        """Build a case, scan its sensitivities, and read the stored table."""
        kind, device, choices = CASES[name]
        model = Replicas(kind, 0)
        document = {"schema": "autoprec.space/1", "name": name, "baseline": "bf16", "activations": ["bf16"]}
        space = space_from_dict({**document, "choices": [{"match": "*", "choices": choices}]})
        report = recorded(model)
        cost = CostModel(report, target(device), scale=CostScale.parse(SCALE))
        problem = Problem.build(report, space, cost.can_run)
        if any(len(group.choices) != len(choices) for group in problem.groups):
            raise SystemExit(f"{name}: refused choices {problem.refused}")
        scan, checks = scan_of(problem, model)
        path, known = RESULTS / f"search_quality_{name}.npz", {}
        if path.exists():  # the modelled times of the stored run too: a later cost model must not shift the target
            stored = np.load(path)
            rows = zip(stored["assignment"], stored["divergence"], strict=True)
            known = {row.tobytes(): float(value) for row, value in rows}
            times, base = stored["time_ms"], float(stored["base_ms"])
        else:
            times = problem.table(lambda g, c: cost.layer_time_ms(g.name, _plan(problem, c), activations="bf16"))
            whole = cost.estimate(problem.plans(problem.params_of("bf16")), activations="bf16").time_ms
            base = float(whole - times[:, problem.choice_names.index("bf16")].sum())
        prior = Prior(times, scan.error2, base, time_noise=1e-4, time_trust=0.02)
        return cls(name, model, problem, prior, scan, checks, known)

    def save(self) -> None:
        """Store every measured assignment."""
        RESULTS.mkdir(exist_ok=True)
        rows = sorted(self.table)
        assignment = np.array([np.frombuffer(row, dtype=np.uint8) for row in rows])
        values = np.array([self.table[row] for row in rows], dtype=np.float32)
        np.savez_compressed(RESULTS / f"search_quality_{self.name}.npz", **self._columns(assignment, values))

    def _columns(self, assignment: Any, values: Any) -> dict[str, Any]:
        base = np.float64(self.prior.base_time_ms)
        return {"assignment": assignment, "divergence": values, "time_ms": self.prior.time_ms, "base_ms": base}

    def time(self, index: Any) -> float:
        """Return the modelled step time in ms of an assignment ``[G]``."""
        return self.prior.base_time_ms + float(self.prior.time_ms[np.arange(len(index)), np.asarray(index)].sum())

    def divergence(self, assignments: Any) -> list[float]:
        """Return the measured divergence of assignments ``[N, G]``, training those that are not in the table."""
        rows = np.asarray(assignments, dtype=np.uint8)
        new = np.unique(
            np.array([r for r in rows if r.tobytes() not in self.table], dtype=np.uint8).reshape(-1, rows.shape[1]),
            axis=0,
        )
        parts = [part for part in np.array_split(new, max(2, math.ceil(len(new) / BATCH))) if len(part)]
        for part, values in zip(parts, self._spread(parts), strict=True):
            self.table |= {row.tobytes(): value for row, value in zip(part, values, strict=True)}
        return [self.table[r.tobytes()] for r in rows]

    def _spread(self, parts: list[Any]) -> list[list[float]]:
        """Measure parts in two worker processes (forked: each inherits the model)."""
        if sum(map(len, parts)) < 8:
            return [self.measure(part, self.model) for part in parts]
        _WORKER["case"] = self
        with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("fork")) as pool:
            found = list(pool.map(_measure, parts))
        self.trained += sum(map(len, parts))
        return found

    def measure(self, rows: Any, model: Replicas) -> list[float]:
        """Train assignments beside the float32 reference and return their divergences."""
        began = time.process_time()
        choices = ["keep", *self.problem.choice_names]
        batch = np.concatenate([np.zeros((1, rows.shape[1]), dtype=np.int64), rows.astype(np.int64) + 1])
        losses, _ = model.train(batch, choices, STEPS)
        gap = ((losses - losses[:1]).abs() / losses[:1])[1:, -SCORED:].mean(1)
        self.trained += len(rows)
        self.cpu_s += time.process_time() - began
        return [float(v) if math.isfinite(v) else 10.0 for v in gap]


def _plan(problem: Problem, choice: str) -> Any:
    from autoprec.space import Choice

    return Choice.parse(choice).plan(problem.space.all_recipes)


def scan_of(problem: Problem, model: Replicas, checks: int = 40) -> tuple[SensitivityTable, list[tuple[float, float]]]:
    """Measure the sensitivity table as the product does: one gradient per probe, same weights, same batch."""
    choices = ["keep", *problem.choice_names]
    reference = np.zeros((1, len(problem.groups)), dtype=np.int64)
    _, weights = model.train(reference, choices, STEPS, stop=SCAN_STEP)
    probes = [p for p in plan_probes(problem) if not p.id.startswith(("mixed", "parameter"))]
    rows = np.zeros((len(probes) + checks, len(problem.groups)), dtype=np.int64)
    for row, probe in zip(rows, probes, strict=False):
        groups, _, choice = probe.id.partition("|")
        row[[int(g) for g in groups.split(",")]] = choices.index(choice)
    rng = np.random.default_rng(0)
    for row in rows[len(probes) :]:  # random assignments over a random subset of the choices each
        kept = rng.permutation(len(choices) - 1)[: rng.integers(2, len(choices))]
        row[:] = rng.choice(kept, len(row)) + 1
    errors: list[float] = []
    for start in range(0, len(rows), BATCH):
        part = np.concatenate([reference, rows[start : start + BATCH]])
        grads = model.gradients(weights, SCAN_STEP, part, choices)
        errors += ((grads[1:] - grads[:1]).norm(dim=1) / grads[0].norm()).tolist()
    both = [model.gradients(weights, SCAN_STEP + k, reference, choices)[0] for k in range(2)]
    noise = float((both[0] - both[1]).norm() / math.sqrt(2) / torch.stack(both).mean(0).norm())
    answers = [{"id": p.id, "gradient_error": e} for p, e in zip(probes, errors, strict=False)]
    table = SensitivityTable.from_probes(problem, {"probes": answers, "gradient_noise": noise})
    groups = np.arange(len(problem.groups))
    predicted = [math.sqrt(table.error2[groups, row - 1].sum()) for row in rows[len(probes) :]]
    return table, list(zip(predicted, errors[len(probes) :], strict=True))
