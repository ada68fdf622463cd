"""A simulated script: answers trials from a formula instead of training, so that the search itself can be tested.

The gradient error of a policy is the root of summed squares of per-layer errors; the loss curve is a decaying
exponential shifted by an amount that follows the gradient error; time is the sum of per-layer times. Everything is
a pure function of the policy and the seed, so that an interrupted and a plain search must agree exactly.
"""

from __future__ import annotations

import hashlib
import math
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from autoprec.graph.report import GemmCall, GraphReport, Layer
from autoprec.policy import LayerPlan, Policy, policy_from_dict, resolve
from autoprec.precision.recipes import BUILTIN_RECIPES
from autoprec.trial.driver.base import Runner
from autoprec.trial.protocol import (
    REFERENCE,
    DuelRounds,
    DuelSpec,
    GradientErrors,
    HostInfo,
    ProbeResult,
    RecordSpec,
    ScanSpec,
    TrainSpec,
    TrialResult,
    TrialSpec,
)

__all__ = ["SimulatedRunner", "SimulatedScript", "simulated_graph"]

#: Relative gradient error and relative GEMM time of each format, of the order measured on small GPTs.
ERROR = {
    "keep": 0.0,
    "fp32": 0.0,
    "tf32": 0.0005,
    "bf16": 0.003,
    "fp16": 0.001,
    "fp8": 0.02,
    "mxfp8": 0.02,
    "nvfp4": 0.09,
    "int8": 0.004,
}
TIME = {
    "keep": 1.0,
    "fp32": 1.0,
    "tf32": 0.6,
    "bf16": 0.3,
    "fp16": 0.3,
    "fp8": 0.2,
    "mxfp8": 0.2,
    "nvfp4": 0.15,
    "int8": 0.2,
}
_ROLES = (("qkv", 3, 1), ("proj", 1, 1), ("fc", 4, 1), ("down", 1, 4))


def simulated_graph(blocks: int = 2, width: int = 64, tokens: int = 256) -> GraphReport:
    """Return the report of a GPT-like model: ``4 * blocks`` layers and a head, each a group of its own."""
    layers = []

    def add(name: str, k: int, n: int, flags: tuple[str, ...] = ()) -> None:
        gemms = (
            GemmCall("fprop", tokens, k, n),
            GemmCall("dgrad", tokens, n, k),
            GemmCall("wgrad", n, tokens, k),
        )
        layers.append(
            Layer(
                name=name,
                type="Linear",
                kind="linear",
                weight=f"{name}.weight",
                group=name,
                gemms=gemms,
                parameters=k * n,
                tunable=True,
                reason="weighted GEMM",
                flags=flags,
                flops={gemm.role: gemm.flops for gemm in gemms},
                dtype="float32",
            )
        )

    for block in range(blocks):
        for role, n, k in _ROLES:
            add(f"blocks.{block}.{role}", k * width, n * width, ("first",) if not layers else ())
    add("head", width, 256, ("head",))
    parameters = sum(layer.parameters for layer in layers)
    total = sum(layer.total_flops for layer in layers)
    size = 4 * parameters
    return GraphReport(
        model={"class": "Simulated", "parameters": parameters, "fingerprint": f"sha256:{blocks}-{width}"},
        layers=tuple(layers),
        operators=(),
        groups={layer.name: (layer.name,) for layer in layers},
        total_flops=total,
        tunable_flops_share=1.0,
        batch={"samples": 8, "tokens": tokens},
        memory={"parameters": size, "gradients": size, "optimizer": 2 * size, "saved_for_backward": 4 * tokens * width},
        source="real",
    )


def _blocks(graph: GraphReport) -> int:
    return sum(layer.name.endswith(_ROLES[0][0]) for layer in graph.layers)


@dataclass(slots=True)
class SimulatedScript:
    """What the simulated script is like.

    ``fail`` may return (status, reason) for a policy document and so fail that trial; ``delay_s`` is slept per trial;
    ``probe_s`` is what a probe would take, so that some are left out of a scan with too little time; ``hardly_moved``
    are layers without a gradient yet;
    ``compile_s`` is what it compiles its whole model for (0: it does not compile itself), and a step of compiled blocks
    takes a fifth longer; ``whole_factor`` multiplies the step under a policy that is compiled as a whole.
    ``library_factor`` multiplies the step of a policy by the library that its evidence names, None where that cannot
    run it; ``noise`` is how far any change at all moves the loss of a run, as a gradient error would; ``calls`` lists
    every spec that ran, by seed. ``error_scale`` multiplies every gradient error: a layer's share of the whole gradient
    shrinks with the root of their number, so a model of 500 layers is no worse than one of nine.
    """

    graph: GraphReport = field(default_factory=simulated_graph)
    head_factor: float = 6.0
    noise: Callable[[int, TrialSpec], float] = lambda _seed, _spec: 0.0
    error_scale: float = 1.0
    step_ms: float = 100.0
    fail: Callable[[Mapping[str, Any] | None], tuple[str, str] | None] | None = None
    delay_s: float = 0.0
    probe_s: float = 0.0
    hardly_moved: tuple[str, ...] = ()
    device: str = "cpu"
    compile_s: float = 0.0
    library_factor: Callable[[str], float | None] = lambda _name: 1.0
    whole_factor: Callable[[Mapping[str, Any]], float] = lambda _policy: 1.0
    calls: list[tuple[int, TrialSpec]] = field(default_factory=list)

    def error(self, document: Mapping[str, Any] | None) -> float:
        """Return the relative gradient error of a policy."""
        total = 0.0
        for name, plan in self.plans(document).items():
            factor = self.error_scale * (self.head_factor if name == "head" else 1.0)
            shares = [ERROR[recipe.format] ** 2 if recipe else 0.0 for recipe in (plan.fprop, plan.dgrad, plan.wgrad)]
            total += factor**2 * sum(shares) / 3
        return math.sqrt(total)

    def plans(self, document: Mapping[str, Any] | None) -> dict[str, LayerPlan]:
        """Return what every layer runs under a policy document."""
        names = [layer.name for layer in self.graph.tunable]
        if document is None:
            return dict.fromkeys(names, LayerPlan())
        policy: Policy = policy_from_dict(dict(document))
        plans = resolve(policy, names)
        if policy.activations == "keep":
            return plans
        cast = LayerPlan.uniform(BUILTIN_RECIPES[policy.activations])
        return {name: cast if plan.keeps else plan for name, plan in plans.items()}

    def milliseconds(self, document: Mapping[str, Any] | None) -> float:
        """Return the step time of a policy."""
        plans = self.plans(document)
        work = {layer.name: layer.total_flops for layer in self.graph.tunable}
        used = 0.0
        for name, plan in plans.items():
            rates = [TIME[recipe.format] if recipe else 1.0 for recipe in (plan.fprop, plan.dgrad, plan.wgrad)]
            used += work[name] * sum(rates) / 3
        compiled = document is not None and document.get("execution") == "compile"
        library = self.library_factor(named_backend(document)) or 1.0
        return self.step_ms * (0.2 + 0.8 * used / sum(work.values())) * (0.8 if compiled else 1.0) * library


def named_backend(document: Mapping[str, Any] | None) -> str:
    """Return who runs a policy's quantised layers, native where its evidence does not say."""
    rows = ((document or {}).get("evidence") or {}).get("backends", {})
    return next((str(row["backend"]) for row in rows.values()), "native")


class SimulatedRunner(Runner):
    """Runs trials of a :class:`SimulatedScript`, as :class:`~autoprec.trial.driver.runner.TrialRunner` does."""

    def __init__(self, script: SimulatedScript, seed: int = 0) -> None:
        self.script, self.seed = script, seed
        self._closed = threading.Event()

    def start(self) -> HostInfo:
        """Return what a host would have found."""
        graph = self.script.graph
        names = tuple(layer.name for layer in graph.tunable)
        compiled = bool(self.script.compile_s)
        made = HostInfo("fork", dict(graph.model), names, ("AdamW",), self.script.device)
        return replace(made, compiled=compiled, blocks=_blocks(graph))

    def run(self, spec: TrialSpec) -> TrialResult:
        """Answer one spec."""
        script = self.script
        script.calls.append((self.seed, spec))
        if script.delay_s:
            self._closed.wait(script.delay_s)
        failure = script.fail(spec.policy) if script.fail else None
        if failure is not None:
            return TrialResult(failure[0], failure[1], tail="the last line of its output")
        if isinstance(spec, RecordSpec):
            return TrialResult("ok", answer=script.graph)
        if isinstance(spec, ScanSpec):
            most = max(1, int(spec.within_s / script.probe_s)) if spec.within_s is not None and script.probe_s else None
            asked = spec.probes[:most]
            rows = tuple(ProbeResult(p.id, script.error(p.policy)) for p in asked)
            noise = 0.5 if spec.noise_batches > 1 else None
            answer = GradientErrors(rows, noise, hardly_moved=script.hardly_moved)
            return TrialResult("ok", warmup=spec.warmup, answer=answer)
        if isinstance(spec, DuelSpec):
            return self._duel(spec)
        assert isinstance(spec, TrainSpec)
        return self._train(spec)

    def _duel(self, spec: DuelSpec) -> TrialResult:
        """Time policies beside each other: rounds without noise."""
        asked = {REFERENCE: spec.policy} | {probe.id: probe.policy for probe in spec.probes}
        factor = self.script.library_factor
        lacking = [p.id for p in spec.probes if spec.by_backend and factor(named_backend(p.policy)) is None]
        refused = dict.fromkeys(lacking, "not here")
        asked = {name: p for name, p in asked.items() if name not in lacking}
        ms = {
            name: self._train(TrainSpec(policy=p, by_block=spec.by_block), in_duel=True).step_ms[-1]
            for name, p in asked.items()
        }
        return TrialResult(
            "ok", answer=DuelRounds((ms,) * 8, steps=8, block=int(spec.side_by_side == 1), refused=refused)
        )

    def _train(self, spec: TrainSpec, *, in_duel: bool = False) -> TrialResult:
        script, steps = self.script, spec.steps + spec.warmup
        error = script.error(spec.policy) + (1e-4 if spec.perturb else 0.0)
        error += script.noise(self.seed, spec) if error else 0.0
        key = repr((self.seed, sorted((spec.policy or {}).get("layers", []), key=repr))).encode()
        sign = 1 if hashlib.sha256(key).digest()[0] % 2 else -1
        losses = tuple((1.0 + sign * 0.01 * error * i / steps) * (1.0 + 2.0 * math.exp(-i / 20)) for i in range(steps))
        milliseconds = script.milliseconds(spec.policy)
        blocks = 0
        if spec.by_block and script.compile_s:
            milliseconds, blocks = 1.2 * milliseconds, _blocks(script.graph)
            losses = tuple(loss * (1 + 1e-4) for loss in losses)  # other kernels round in another way
        elif spec.policy is not None:
            milliseconds *= script.whole_factor(spec.policy)
        compile_s = script.compile_s / max(1, blocks)
        return TrialResult(
            "ok",
            losses=losses,
            step_ms=(milliseconds,) * steps,
            warmup=spec.warmup,
            memory_bytes=sum(script.graph.memory.values()),
            samples=8,
            start_s=0.01,
            wall_s=milliseconds * steps / 1000,
            training_s=milliseconds * steps / 1000 + compile_s,
            blocks=blocks,
        )

    def close(self) -> None:
        """End the running trial."""
        self._closed.set()
