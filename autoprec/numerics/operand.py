"""The operand of a GEMM as data: how it is quantised, its codes and scales, and what a layer remembers."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from autoprec.numerics.delayed.repeated import Used, learning, remember, repeated
from autoprec.numerics.rounding import STORAGE, number
from autoprec.numerics.scaling import DelayedScale
from autoprec.numerics.sharded import Groups
from autoprec.precision.formats import FORMATS
from autoprec.precision.recipes import Gemm, Scaling


@dataclass(frozen=True, slots=True)
class ScaleRule:
    """A recipe's :class:`Scaling` as graphs are traced with it, field by field.

    Dynamo of torch 2.11 can trace neither the truth nor the comparison of a pydantic object.
    """

    granularity: str = "tensor"
    scale: str = "current"
    power_of_2: bool = False
    margin: int = 0
    amax_history_len: int = 16
    amax_compute_algo: str = "max"
    amax_epsilon: str = ""  # written out: see :func:`autoprec.numerics.rounding.number`; nothing for 0

    @classmethod
    def of(cls, scaling: Scaling) -> ScaleRule:
        """Return the same rule as plain fields."""
        fields = {name: getattr(scaling, name) for name in Scaling.model_fields}
        return cls(**{**fields, "amax_epsilon": repr(scaling.amax_epsilon) if scaling.amax_epsilon else ""})

    @property
    def epsilon(self) -> float:
        """The least magnitude that counts."""
        return number(self.amax_epsilon) if self.amax_epsilon else 0.0


_DEFAULT = ScaleRule()


@dataclass(frozen=True, slots=True)
class Spec:
    """How one operand is quantised for one GEMM; equal specs give equal results, so they are computed once.

    ``axis`` is the contraction axis (0 or 1), or -1 where the result does not depend on it (casts, tensor scales,
    square blocks). ``scheme`` is cast, tensor, row, block, mx, nvfp4.
    """

    scheme: str
    format: str
    axis: int = -1
    scaling: ScaleRule | None = None
    square: bool = False
    hadamard: bool = False
    stochastic: bool = False

    @property
    def rule(self) -> ScaleRule:
        """How scales are chosen; the defaults where nothing is said."""
        return _DEFAULT if self.scaling is None else self.scaling

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which codes of the format are stored."""
        return STORAGE[self.format]


#: Contraction axis of (first, second) operand of each GEMM, as 2-D tensors input [M, K], weight [N, K],
#: grad_output [M, N].
CONTRACTION: dict[Gemm, tuple[int, int]] = {"fprop": (1, 1), "dgrad": (1, 0), "wgrad": (0, 0)}


@dataclass(slots=True)
class QuantizedOperand:
    """Codes and scales of one operand.

    Attributes:
        codes: the stored values, in the format's dtype; in groups for block, MX and NVFP4.
        scale: float32, constant along the contraction axis, multiplies the GEMM's result; None where there is none.
        groups: scales that lie inside the sum (float32, E8M0 as uint8, or E4M3); None where there are none.
    """

    codes: Tensor
    scale: Tensor | None
    spec: Spec
    rows: int
    columns: int
    groups: Tensor | None = None

    @property
    def inside(self) -> Tensor:
        """The scales that lie inside the sum: one per group, in the shape of the grid of groups.

        Raises:
            ValueError: it has none.
        """
        if self.groups is None:
            raise ValueError("an operand in the scheme '" + self.spec.scheme + "' has no group scales")
        return self.groups


@dataclass(slots=True, eq=False)
class QuantizerState:
    """What quantisation of one layer remembers between calls: delayed scales and private random streams.

    Nothing here touches torch's global random streams, so that paired runs stay paired. ``copied`` is true of a copied
    layer until it is trained: its history is that of other weights as soon as an average is written into it, which may
    run in training mode (the teacher of a mean teacher). ``passed_back`` is true when a
    backward pass has run since delayed scales last learned. ``traced`` is true where amaxes are noted in a compiled
    graph or on a GPU, and ``numerics.delayed`` learns them for all layers at once; ``prepared`` is the device on which
    the tensors for that lie. ``groups``: operand -> process groups over which it is cut, where scales of whole tensors
    are reduced (``numerics.sharded``).
    """

    seed: int = 0
    copied: bool = False
    passed_back: bool = False
    traced: bool = False
    prepared: torch.device | None = None
    groups: Groups = field(default_factory=dict)
    delayed: dict[tuple[str, Spec], DelayedScale] = field(default_factory=dict)
    graph: dict[str, DelayedScale] = field(default_factory=dict)  # the same ones, by a key that Dynamo can look up
    generators: dict[torch.device, torch.Generator] = field(default_factory=dict)

    def __deepcopy__(self, memo: dict[int, Any]) -> QuantizerState:
        """A copied layer computes what this one computes: with histories and a stream of its own that stand alike."""
        made = memo[id(self)] = QuantizerState(self.seed, copied=True)
        made.delayed, made.graph = copy.deepcopy((self.delayed, self.graph), memo)
        made.prepared, made.groups = self.prepared, self.groups
        for device, generator in self.generators.items():
            made.generator(device).set_state(generator.get_state())
        return made

    def generator(self, device: torch.device) -> torch.Generator:
        """Return this layer's private random stream on ``device``."""
        if device not in self.generators:
            made = torch.Generator(device=device)
            made.manual_seed(self.seed)
            self.generators[device] = made
        return self.generators[device]

    def learns(self) -> bool:
        """Say whether delayed scaling learns from a forward without gradients: one that checkpointing repeats later."""
        return not torch.compiler.is_compiling() and learning()

    def delayed_scale(self, operand: str, spec: Spec, amax: Tensor, *, update: bool, evaluates: bool = False) -> Tensor:
        """Return the delayed scale of an operand; a recomputed forward reuses the scale of the forward it repeats.

        Args:
            operand: ``input``, ``weight`` or ``grad_output``.
            spec: how it is quantised.
            amax: the tensor's largest magnitude now, 0-d float32 (shape ``[]``).
            update: whether the amax is noted for the history.
            evaluates: no training step: what is larger than the history scales by its own amax.

        Returns:
            The scale that the tensor is multiplied by, 0-d float32.
        """
        evaluates = evaluates or (self.copied and not update)
        if torch.compiler.is_compiling():
            traced = self.graph[_slot(operand, spec)]
            scale = traced.traced(amax, update=update)
            return traced.wide_enough(scale, amax) if evaluates else scale
        self.copied = self.copied and not update
        found = repeated((self, operand, spec))
        noted = found is not None and found.noted
        update = update and not noted
        history = self.history(operand, spec)
        if self.prepared is not None and self.prepared == amax.device and amax.is_cuda:
            # the host neither waits for the device nor launches a history per operand
            self.traced = self.traced or update
            scale = history.traced(amax, update=update)
        else:
            scale = history.step(amax, update=update)
        if evaluates:
            scale = history.wide_enough(scale, amax)
        if found is not None:
            scale = found.scale
        remember((self, operand, spec), Used(scale, update or noted))
        return scale

    def prepare(self, operands: Iterable[tuple[str, Spec]], device: torch.device) -> None:
        """Make the tensors of these delayed operands on ``device``, for a graph to be traced."""
        for operand, spec in operands:
            scale = self.graph[_slot(operand, spec)] = self.history(operand, spec)
            scale.prepare(device)
        self.prepared = device

    def history(self, operand: str, spec: Spec) -> DelayedScale:
        """Return the delayed scaling of an operand, begun where there was none."""
        key = (operand, spec)
        found = self.delayed.get(key)
        if found is None:
            scaling = spec.rule
            found = self.delayed[key] = DelayedScale(
                FORMATS[spec.format].max,
                length=scaling.amax_history_len,
                algorithm=scaling.amax_compute_algo,
                margin=scaling.margin,
                power_of_2=scaling.power_of_2,
            )
        return found


def _slot(operand: str, spec: Spec) -> str:
    how = spec.rule
    history = f"{how.amax_history_len} {how.amax_compute_algo}"
    return f"{operand} {spec.format} {history} {how.margin} {how.power_of_2} {how.epsilon}"
