"""The cases of quality.py: which model, which choices, which target, how long, and how much truth each is given.

Every model is tiny and stands for a large one: divergence is that of the small model's real training runs, time is
modelled at ``scale``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from autoprec.cost import CostModel
from autoprec.graph.report import GemmCall, GraphReport, Layer
from autoprec.policy import OptimizerPolicy

if TYPE_CHECKING:
    from benchmarks.search.replicas import Replicas


#: The budget of divergence.
MAX_DIVERGENCE = 0.0025


@dataclass(frozen=True)
class Seeds:
    """How much truth a case is given.

    Attributes:
        runs: trial seeds that every strategy is run under.
        levels, front: (truth seeds, factor): so many for what is within this factor of the divergence of a run's own
            front, and of the best known front of all.
        judge: judge seeds of what was picked: near the best known front, and elsewhere.
        batch: replicas that are trained at once.
    """

    runs: int = 8
    levels: tuple[tuple[int, float], ...] = ((4, 1.6), (8, 1.2))
    front: tuple[tuple[int, float], ...] = ((4, 1.6), (8, 1.25), (24, 1.08))
    judge: tuple[int, int] = (24, 8)
    batch: int = 256


_MANY = Seeds()
_FEW = Seeds(4, ((2, 1.5), (4, 1.15)), ((2, 1.5), (4, 1.2), (8, 1.06)), (16, 4), 128)
_FEWER = Seeds(3, ((1, 1.4), (3, 1.15)), ((1, 1.4), (3, 1.15), (8, 1.05)), (12, 3), 64)
_B200 = ["bf16", "mxfp8", "nvfp4_plain", "nvfp4_plain/wgrad=mxfp8"]
_H100 = ["bf16", "fp8_rowwise", "fp8_tensorwise", "fp8_rowwise/wgrad=bf16"]
_CONV = ["bf16", "fp16", "fp32"]
_FP4 = ["bf16", "mxfp8", "nvfp4", "nvfp4/wgrad=mxfp8", "nvfp4/wgrad=bf16", "nvfp4_plain"]


@dataclass(frozen=True)
class Spec:
    """What a case is.

    Attributes:
        model: a key of ``replica_models.MODELS``; ``sizes`` are its arguments.
        device: the target whose time is modelled.
        rules: glob -> choices, the first that matches counts.
        steps: length of a run; the second half of its losses is compared.
        scale: of the modelled times (``--cost-scale``).
        seeds: how much truth it is given.
        optimizer, communication: values that may be chosen beside the layers'.
        small: glob -> how much less than scaled such a layer takes (a router is not as wide as a model).
        blind: defined before its truth was recorded, and never tuned on.
    """

    model: str
    device: str
    rules: Mapping[str, Sequence[str]]
    sizes: Mapping[str, Any] = field(default_factory=dict)
    steps: int = 14
    scale: str = "width=256,tokens=256"
    seeds: Seeds = _FEW
    optimizer: Mapping[str, Sequence[str]] = field(default_factory=dict)
    communication: Mapping[str, Sequence[str]] = field(default_factory=dict)
    small: Mapping[str, float] = field(default_factory=dict)
    blind: bool = False

    @property
    def parameters(self) -> dict[str, Sequence[str]]:
        """Name -> values of what is chosen beside the layers."""
        out = {f"optimizer.{name}": values for name, values in self.optimizer.items()}
        return out | {f"communication.{name}": values for name, values in self.communication.items()}

    def replicas(self, seeds: Sequence[int]) -> Replicas:
        """Return the model, with one member per seed."""
        from benchmarks.search.replica_models import build

        return build(self.model, seeds, parameters=self.parameters, **self.sizes)


_GPT, _VIT, _TWO = {"data": "text"}, {"data": "digits"}, {"blocks": 2, "batch": 2}
#: The two that came first, the harder ones, and last the two that the first method was developed on.
CASES = {
    "gpt-b200": Spec("transformer", "b200", {"*": _B200}, _GPT, seeds=_MANY),
    "vit-h100": Spec("transformer", "h100", {"*": _H100}, _VIT, seeds=_MANY),
    "conv-h100": Spec(
        "conv",
        "h100",
        {"stem": _CONV, "block.*": _CONV, "*": _H100},
        {"data": "digits", "blocks": 2, "batch": 16},
        steps=12,
        scale="width=64,tokens=64",
        seeds=_FEWER,
    ),
    "lstm-h100": Spec("lstm", "h100", {"*": _H100}, {"blocks": 3, "batch": 8, "tokens": 8}, seeds=_FEWER),
    "moe-b200": Spec(
        "moe",
        "b200",
        {"*router": ["bf16", "mxfp8"], "*": _B200},
        {**_TWO, "ratio": 2},
        scale="width=256,tokens=512",
        small={"*router": 1 / 128},
    ),
    "state-h100": Spec(
        "transformer",
        "h100",
        {"*": _H100},
        _TWO,
        scale="width=256,tokens=512",
        optimizer={"weights": ("fp32", "bf16_stochastic"), "exp_avg": ("fp32", "bf16", "e4m3")},
        communication={"gradients": ("fp32", "bf16", "fp8")},
    ),
    "deep-b200": Spec(
        "transformer",
        "b200",
        {"*": _B200[:3]},
        {"blocks": 15, "batch": 2, "ratio": 1},
        steps=10,
        scale="width=256,tokens=512",
        seeds=_FEWER,
    ),
    "fp4-b200": Spec("transformer", "b200", {"*": _FP4}, {"blocks": 3, "batch": 2}, scale="width=256,tokens=512"),
    "long-h100": Spec(
        "mlp",
        "h100",
        {"*": _H100},
        {"data": "text", "tokens": 4, "blocks": 4, "batch": 32, "ratio": 1},
        steps=200,
        scale="width=256,tokens=512",
        seeds=_FEWER,
    ),
    "mixer-b200": Spec(
        "mixer",
        "b200",
        {"*": ["bf16", "mxfp8", "nvfp4", "nvfp4/wgrad=bf16"]},
        {"data": "digits", "blocks": 3, "batch": 2, "tokens": 32, "ratio": 2},
    ),
    "dit-h100": Spec("dit", "h100", {"*": _H100}, {"data": "digits", "blocks": 3, "batch": 8, "ratio": 2}),
    "seq2seq-b200": Spec(
        "encoder-decoder", "b200", {"*": _B200}, _TWO, scale="width=256,tokens=512", seeds=_MANY, blind=True
    ),
    "gpt-h100": Spec("transformer", "h100", {"*": _H100}, _GPT, seeds=_MANY),
    "vit-b200": Spec("transformer", "b200", {"*": _B200}, _VIT, seeds=_MANY),
}
REPORTED = tuple(CASES)[:12]
#: The GPUs that gradients are reduced over in the case with communication: eight nodes of eight, half of it hidden
#: behind the backward pass (assumed).
NODES, HIDDEN = 8, 0.5


def recorded(spec: Spec) -> GraphReport:
    """Return the graph report of a replica's model: its GEMMs, one group per layer."""
    layers = []
    for name, shape in spec.replicas(()).layers().items():
        m, n, k = shape.m // shape.count, shape.n, shape.k
        if "head" in shape.flags:  # stands for a large vocabulary: no scale reaches it, and at 96 no GPU gains there
            n = 32768
        gemms = tuple(
            replace(gemm, calls=shape.calls, batch=shape.count)
            for gemm in (GemmCall("fprop", m, k, n), GemmCall("dgrad", m, n, k), GemmCall("wgrad", n, m, k))
        )
        flops = {gemm.role: gemm.flops for gemm in gemms}
        kind, parameters = shape.kind, n * k * shape.count
        cls = "Conv2d" if kind == "conv" else "Linear"
        layers.append(Layer(name, cls, kind, name, name, gemms, parameters, True, "", shape.flags, flops, "float32"))
    total = sum(layer.total_flops for layer in layers)
    info = {"class": spec.model, "parameters": sum(x.parameters for x in layers), "fingerprint": ""}
    return GraphReport(info, tuple(layers), (), {x.name: (x.name,) for x in layers}, total, 1.0, memory={})


def parameter_times(spec: Spec, cost: CostModel, whole: float) -> dict[tuple[str, str], float]:
    """Return the modelled ms that a value saves against its parameter's default: the update's, and the all-reduce's."""
    state: dict[str, Any] = {name: values[0] for name, values in spec.optimizer.items()}
    out = {}
    for name, values in spec.optimizer.items():
        for value in values[1:]:
            policy = OptimizerPolicy(**{**state, name: value})
            out[f"optimizer.{name}", value] = cost.estimate({}, activations="bf16", optimizer=policy).time_ms - whole
    links = cost.target.links
    for name, values in spec.communication.items():
        sent = {"fp32": 4.0, "bf16": 2.0, "fp8": 1.0}
        for value in values[1:]:
            less = cost.parameters * (sent[value] - sent[values[0]])
            near, far = 2 * 7 / 8 * less / links["scale_up"], 2 * (NODES - 1) / NODES * less / 8 / links["scale_out"]
            out[f"communication.{name}", value] = HIDDEN * (near + far) * 1e3
    return out
