"""The operand of a GEMM as data: how it is quantised, its codes and scales, and what a layer remembers."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from autoprec.numerics.rounding import STORAGE
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
    amax_epsilon: float = 0.0

    @classmethod
    def of(cls, scaling: Scaling) -> ScaleRule:
        """Return the same rule as plain fields."""
        return cls(**{name: getattr(scaling, name) for name in Scaling.model_fields})


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

    Nothing here touches torch's global random streams, so that paired runs stay paired. ``shared`` is true where ranks
    agree on delayed scales before they are computed (``numerics.delayed``). ``postponed`` counts training forwards
    without a graph, which are the first of two where reentrant checkpointing recomputes. ``traced`` is true where
    amaxes are only noted, in a compiled graph and on a GPU, and ``numerics.delayed`` learns them for all layers at
    once; ``prepared`` is the device on which the tensors for that lie. ``groups``: operand -> process
    groups over which it is cut, where scales of whole tensors are reduced (``numerics.sharded``).
    """

    seed: int = 0
    shared: bool = False
    traced: bool = False
    prepared: torch.device | None = None
    groups: Groups = field(default_factory=dict)
    postponed: int = 0
    delayed: dict[tuple[str, Spec], DelayedScale] = field(default_factory=dict)
    graph: dict[str, DelayedScale] = field(default_factory=dict)  # the same ones, by a key that Dynamo can look up
    last: dict[tuple[str, Spec], Tensor] = field(default_factory=dict)
    generators: dict[torch.device, torch.Generator] = field(default_factory=dict)

    def __deepcopy__(self, memo: dict[int, Any]) -> QuantizerState:
        """A copied layer computes what this one computes: with histories and a stream of its own that stand alike."""
        made = memo[id(self)] = QuantizerState(self.seed)
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

    def learns(self, *, grad: bool, recompute: bool) -> bool:
        """Say whether delayed scaling learns from this training forward: once per step, however often it runs.

        Activation checkpointing runs it twice: first with gradients on and again in the backward pass, or (reentrant)
        first with gradients off, where only the second run tells it from an evaluation. A graph is traced once.
        """
        if torch.compiler.is_compiling():
            return grad
        if not grad:
            self.postponed += not recompute
            return False
        postponed, self.postponed = self.postponed, max(self.postponed - 1, 0) if recompute else 0
        return not recompute or postponed > 0

    def delayed_scale(self, operand: str, spec: Spec, amax: Tensor, *, update: bool, recompute: bool) -> Tensor:
        """Return the delayed scale of an operand; a recomputed forward reuses the scale of the forward it repeats.

        Args:
            operand: ``input``, ``weight`` or ``grad_output``.
            spec: how it is quantised.
            amax: the tensor's largest magnitude now, 0-d float32 (shape ``[]``).
            update: whether the history learns from it.
            recompute: whether this forward repeats an earlier one.

        Returns:
            The scale that the tensor is multiplied by, 0-d float32.
        """
        key = (operand, spec)
        if torch.compiler.is_compiling():
            return self.graph[_slot(operand, spec)].traced(amax, update=update)
        if recompute and key in self.last:
            if update:
                self.history(*key).take(amax, shared=self.shared or self.traced)
            return self.last[key]
        if self.prepared is not None and self.prepared == amax.device and amax.is_cuda:
            # the host neither waits for the device nor launches a history per operand
            self.traced = self.traced or update
            scale = self.last[key] = self.history(*key).traced(amax, update=update)
            return scale
        scale = self.last[key] = self.history(*key).step(amax, update=update, shared=self.shared)
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
    return f"{operand} {spec.format} {history} {how.margin} {how.power_of_2} {how.amax_epsilon}"
