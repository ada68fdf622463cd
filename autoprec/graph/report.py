"""What one recorded training step says, as plain frozen data: no torch, JSON in and out.

The recorder (which needs torch) writes it in the process that trains; the driver reads it without importing torch.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from autoprec.errors import FileError
from autoprec.graph.census import Judged
from autoprec.graph.trace import bare_name
from autoprec.policy.sections import PRODUCTS
from autoprec.support.files import read_text
from autoprec.support.living import uncollected
from autoprec.support.plain import rebuild, shallow

#: A recorded step of the largest model that was seen is a hundredth of it.
MAX_GRAPH_BYTES = 256 * 1024 * 1024
#: Fields of an operator that are lists in JSON.
_TUPLES = ("dtypes", "out_dtypes", "inputs", "out_saved", "sources")
#: Operators that multiply matrices, by their bare names: one or a batch, and those that add the product to a tensor.
MULTIPLYING = ("mm", "bmm", "addmm", "baddbmm")
#: Parts of a step that are told apart from the model's: inside an optimizer's step, and inside a loader's.
OPTIMIZER, DATA = "optimizer", "data"


@dataclass(frozen=True, slots=True)
class GemmCall:
    """One GEMM of a layer in one step: ``[M, K] x [K, N]``, run ``calls`` times.

    ``role`` is fprop, dgrad, wgrad or recompute (a checkpointed forward run again). For fprop M is tokens, K
    in_features, N out_features; dgrad and wgrad give their own M, K, N. ``batch`` counts batched or grouped GEMMs.
    """

    role: str
    m: int
    k: int
    n: int
    calls: int = 1
    batch: int = 1

    @property
    def flops(self) -> int:
        """Floating-point operations in one step: ``2 M K N`` per call and batch entry."""
        return 2 * self.m * self.k * self.n * self.calls * self.batch


@dataclass(frozen=True, slots=True)
class NewtonSchulz:
    """Matrices of one shape, ``rows`` no more than ``columns``, whose updates Muon makes orthogonal in a step.

    Each of the ``iterations`` multiplies three times (torch/optim/_muon.py), whatever the precision of the layers.
    """

    rows: int
    columns: int
    iterations: int
    matrices: int = 1

    @property
    def products(self) -> tuple[tuple[int, int, int], ...]:
        """``[M, K] x [K, N]`` of one iteration on one matrix X: X X', its square, and their sum times X."""
        r, c = self.rows, self.columns
        return (r, c, r), (r, r, r), (r, r, c)

    @property
    def flops(self) -> int:
        """Floating-point operations of all iterations over all matrices: 2 M K N of each product."""
        return self.matrices * self.iterations * sum(2 * m * k * n for m, k, n in self.products)


@dataclass(frozen=True, slots=True)
class StepProduct:
    """``calls`` products ``[batch, M, K] x [batch, K, N]`` in an optimizer's step, of operands of one dtype."""

    m: int
    k: int
    n: int
    dtype: str
    batch: int = 1
    calls: int = 1

    @property
    def flops(self) -> int:
        """Floating-point operations of all calls: 2 M K N of each matrix."""
        return 2 * self.m * self.k * self.n * self.batch * self.calls

    def moves_to(self, dtype: str) -> bool:
        """Say whether ``optimizer.products`` computes these in another dtype: large ones of those that it is for."""
        least, operands = PRODUCTS.get(dtype, (0, ()))
        return self.dtype in operands and self.m * self.k * self.n >= least


@dataclass(frozen=True, slots=True)
class Layer:
    """A weighted GEMM or convolution of the model, the unit a policy decides about.

    ``name`` is the module's name relative to the user's root model (what policy globs match). ``kind`` is linear,
    conv, conv1d (transformers), attention_projection, expert, functional or rnn. ``flags`` holds position facts
    (first, head, tied, router, frozen, never_called, complex), narrow (its outputs are experts or classes, whose number
    does not grow with the model) and double_backward. ``flops`` is per role; ``reason`` says why it is tunable or not;
    ``where`` is the ``file:line`` that defines it, where that is the script's own.
    """

    name: str
    type: str
    kind: str
    weight: str
    group: str
    gemms: tuple[GemmCall, ...]
    parameters: int
    tunable: bool
    reason: str
    flags: tuple[str, ...] = ()
    flops: dict[str, int] = field(default_factory=dict)
    dtype: str = ""
    where: str = ""

    @property
    def total_flops(self) -> int:
        """Floating-point operations of the layer's GEMMs in one step, forward, backward and recomputation."""
        return sum(self.flops.values())

    def roles(self) -> tuple[str, ...]:
        """The GEMM roles that ran, in fprop, dgrad, wgrad order (a first layer has no dgrad)."""
        ran = {gemm.role for gemm in self.gemms}
        return tuple(role for role in ("fprop", "dgrad", "wgrad") if role in ran)


@dataclass(frozen=True, slots=True)
class Operator:
    """One operator of the recorded step; ``cls`` and ``precision`` come from the classifier, with its ``reason``.

    ``shapes`` and ``dtypes`` are those of its tensor inputs, in argument order; ``inputs`` are the positions, in
    ``GraphReport.operators``, of the operators that made them. ``pattern`` names the hand-written operator it is part
    of: rms_norm, layer_norm, softmax, cross_entropy, scores, values, ... ``out_saved`` are the bytes of the storages
    that its outputs brought into being and that autograd saved for backward (0 for a view of an earlier one);
    ``sources`` says of each tensor input which operator made it, -1 for a parameter, a buffer or the batch; ``where``
    is the ``file:line`` of the script or of its libraries that ran it, of a backward operator that of its forward one.
    """

    name: str
    module: str
    op: str
    phase: str
    cls: str
    precision: str
    reason: str
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    flops: int
    bytes: int
    weight: str = ""
    role: str = ""
    out_shapes: tuple[tuple[int, ...], ...] = ()
    out_dtypes: tuple[str, ...] = ()
    inputs: tuple[int, ...] = ()
    pattern: str = ""
    out_saved: tuple[int, ...] = ()
    sources: tuple[int, ...] = ()
    where: str = field(default="", compare=False)

    @property
    def attends(self) -> bool:
        """Whether it is attention, fused or written by hand; other products without a weight are of that class, too."""
        return self.cls == "attention" and ("attention" in self.op or self.pattern in ("scores", "values"))

    @property
    def exchanges(self) -> bool:
        """Whether it belongs to an exchange of DTensors between ranks (torch's functional collectives)."""
        return self.op.startswith("_c10d_functional")

    def to_json(self) -> dict[str, Any]:
        """Return the row that ``autoprec inspect --json`` prints, its tuples as they are: a step may have 300,000."""
        out = shallow(self)
        out["class"] = out.pop("cls")
        return out


@dataclass(frozen=True, slots=True)
class GraphReport:
    """A classified training step.

    ``model`` is ``{"class", "parameters", "fingerprint"}``; ``groups`` maps a group's name to the layers that must
    move together; ``batch`` is ``{"samples", "tokens"}`` of one step where they could be seen, and ``micro_batches``
    where it has several; ``memory`` holds bytes of parameters, gradients, optimizer state and tensors saved for
    backward. ``root_called`` is False where the script calls the model's parts, and never the model: what surrounds
    its forward cannot be changed there. ``held`` is the share of the parameters that one rank holds, whose memory this
    is (FSDP2, tensor parallelism). ``fused_update`` says that an optimizer updates with ``fused=True``,
    ``can_fuse`` that one could, and does not. ``gelus_by_hand`` are modules that compute GELU in
    several operations.
    ``newton_schulz`` is what Muon multiplies after that, ``updating`` are the operators of its step, and of other
    optimizers' that multiply, matrix by matrix.
    ``judged`` is what the step says of the script's own precision; None where it had no data, or was modelled.
    """

    model: dict[str, Any]
    layers: tuple[Layer, ...]
    operators: tuple[Operator, ...]
    groups: dict[str, tuple[str, ...]]
    total_flops: int
    tunable_flops_share: float
    batch: dict[str, int] = field(default_factory=dict)
    memory: dict[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    source: str = "real"
    root_called: bool = True
    held: float = 1.0
    fused_update: bool = False
    can_fuse: bool = False
    gelus_by_hand: tuple[str, ...] = ()
    newton_schulz: tuple[NewtonSchulz, ...] = ()
    updating: tuple[Operator, ...] = ()
    judged: Judged | None = None

    @property
    def tunable(self) -> tuple[Layer, ...]:
        """The layers a policy can decide about, in model order."""
        return tuple(layer for layer in self.layers if layer.tunable)

    @property
    def divided(self) -> bool:
        """Whether ranks share layers (tensor parallelism), and this is the step of one of them."""
        # those after backward are of gradients: FSDP2's norm of all ranks, where the script clips
        return any(operator.exchanges and operator.phase != "update" for operator in self.operators)

    def step_products(self) -> list[StepProduct]:
        """Return what the optimizers' steps multiply: as recorded, or Muon's products by its shapes, in bf16."""
        found: Counter[StepProduct] = Counter()
        for row in self.updating:
            name = bare_name(row.op)
            if name in MULTIPLYING:
                at = int("add" in name)
                first, second = row.shapes[at : at + 2]
                batch = first[0] if len(first) == 3 else 1
                found[StepProduct(first[-2], first[-1], second[-1], row.dtypes[at], batch)] += 1
        for one in () if found else self.newton_schulz:
            for m, k, n in one.products:
                found[StepProduct(m, k, n, "bf16")] += one.matrices * one.iterations
        return [replace(one, calls=calls) for one, calls in found.items()]

    def movable(self, dtype: str) -> float:
        """Return the share of a step's FLOPs that ``optimizer.products`` computes in ``dtype`` instead of another."""
        products = self.step_products()
        total = self.total_flops + sum(one.flops for one in products)
        return sum(one.flops for one in products if one.moves_to(dtype)) / total if total else 0.0

    def layer(self, name: str) -> Layer:
        """Return a layer by name; KeyError if there is none."""
        for layer in self.layers:
            if layer.name == name:
                return layer
        raise KeyError(name)

    @uncollected()
    def to_json(self) -> dict[str, Any]:
        """Return the document of ``autoprec inspect --json`` (normative keys first, more beside them)."""
        return {
            "model": dict(self.model),
            "operators": [operator.to_json() for operator in (*self.operators, *self.updating)],
            "layers": [shallow(layer) | {"gemms": [shallow(g) for g in layer.gemms]} for layer in self.layers],
            "groups": {name: list(members) for name, members in self.groups.items()},
            "coverage": {"tunable_flops_share": self.tunable_flops_share, "total_flops": self.total_flops},
            "batch": dict(self.batch),
            "memory": dict(self.memory),
            "notes": list(self.notes),
            "source": self.source,
            "root_called": self.root_called,
            "held": self.held,
            "fused_update": self.fused_update,
            "can_fuse": self.can_fuse,
            "gelus_by_hand": list(self.gelus_by_hand),
            "newton_schulz": [shallow(row) for row in self.newton_schulz],
            "judged": None if self.judged is None else self.judged.to_json(),
        }

    @classmethod
    @uncollected()
    def from_json(cls, document: dict[str, Any]) -> GraphReport:
        """Rebuild a report from :meth:`to_json`."""
        layers = tuple(
            Layer(**{**row, "gemms": tuple(GemmCall(**g) for g in row["gemms"]), "flags": tuple(row["flags"])})
            for row in document["layers"]
        )
        operators = []
        for row in document["operators"]:
            fields = {key: value for key, value in row.items() if key != "class"}
            fields["cls"] = row["class"]
            for name in _TUPLES:
                fields[name] = tuple(row.get(name, ()))
            for name in ("shapes", "out_shapes"):
                fields[name] = tuple(tuple(shape) for shape in row.get(name, ()))
            operators.append(Operator(**fields))
        made = {
            "layers": layers,
            "operators": [operator for operator in operators if operator.phase != "optimizer"],
            "updating": [operator for operator in operators if operator.phase == "optimizer"],
            "groups": {name: tuple(members) for name, members in document["groups"].items()},
            "gelus_by_hand": tuple(document.get("gelus_by_hand", ())),
            "newton_schulz": [NewtonSchulz(**row) for row in document.get("newton_schulz", ())],
            "judged": Judged.from_json(document["judged"]) if document.get("judged") else None,
        }
        return rebuild(cls, document | document["coverage"] | made)


@dataclass(frozen=True, slots=True)
class OperatorTime:
    """One operator of a step: its name (``aten::addmm``), the part of the step, its calls and ms a step, without what
    it calls."""

    op: str
    part: str
    calls: float
    ms: float


@dataclass(frozen=True, slots=True)
class OperatorTimes:
    """Times of the operators of a step.

    Attributes:
        step_ms: median time of a step without the profiler; on a CPU the process's own, as in a trial.
        profiled_ms: mean time of a step under it.
        steps: how many were profiled.
        operators: a row for each operator and part, the longest first; on a GPU the time of its kernels.
    """

    kind: ClassVar[str] = "times"
    step_ms: float
    profiled_ms: float
    steps: int
    operators: tuple[OperatorTime, ...] = ()


def load_report(path: Path | str) -> GraphReport:
    """Read a step that ``autoprec inspect --json`` printed into a file.

    Raises:
        FileError: missing, unreadable, larger than any step, or not a recorded step.
    """
    text = read_text(path, most_bytes=MAX_GRAPH_BYTES)
    try:
        return GraphReport.from_json(json.loads(text))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise FileError(
            f"is not a recorded step: {type(error).__name__}: {error}",
            where=str(path),
            fix="write one with `autoprec inspect --json train.py > FILE`",
        ) from error
