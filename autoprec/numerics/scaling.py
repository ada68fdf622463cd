"""Scales: from the largest magnitude of a tensor, row or block, now or from past steps.

A scale multiplies values before rounding; its inverse multiplies the result. Non-finite input gives a NaN inverse, so
that it shows in the output instead of silently saturating. Sources: torchao ``float8_utils.amax_to_scale``;
Transformer Engine ``recipe/delayed_scaling.cu`` and ``DelayedScaling``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from autoprec.numerics.rounding import number


def amax_of(x: Tensor, axis: int | None = None) -> Tensor:
    """Return the largest magnitude of a tensor; NaN propagates.

    Args:
        x: of any shape and float dtype; an empty one has 0.
        axis: along which; None for the whole tensor.

    Returns:
        0-d float32 (shape ``[]``), or float32 with the size of ``axis`` 1.
    """
    if x.numel() == 0:
        shape = [] if axis is None else [1 if d == axis % x.ndim else n for d, n in enumerate(x.shape)]
        return x.new_zeros(shape, dtype=torch.float32)
    if axis is None and torch.compiler.is_compiling():
        # along rows first, which fuses with what makes and what casts the rows; aminmax would take three kernels more
        return x.abs().amax(-1).amax().float()
    if axis is None and x.device.type == "cuda":
        largest: Tensor = torch.linalg.vector_norm(x, torch.inf)
        return largest.float()
    if axis is None:
        low, high = torch.aminmax(x)
        return torch.maximum(-low, high).float()
    return x.abs().amax(axis, keepdim=True).float()


def power_of_2_floor(scale: Tensor) -> Tensor:
    """Round positive normal float32 values of any shape down to a power of two, exactly."""
    return (scale.view(torch.int32) & 0x7F800000).view(torch.float32)


def scale_of(amax: Tensor, limit: float, *, power_of_2: bool = False, epsilon: float = 0.0) -> Tensor:
    """Return the float32 scale that brings ``amax`` to ``limit`` (1 for all-zero and non-finite tensors).

    The quotient is rounded once, as torchao's division in float64 rounds it: on a CPU float32 division does that by
    itself (and a compiler that computes the scale anew for every value does it eight times faster), Triton's does not.
    A scale beyond float32 becomes its largest value.

    Args:
        amax: largest magnitudes, float32 of any shape.
        limit: the largest value of the format.
        power_of_2: round the scale down to a power of two.
        epsilon: the least magnitude that counts.

    Returns:
        Scales of the shape of ``amax``: a tensor is multiplied by them.
    """
    if epsilon:
        amax = amax.clamp(min=epsilon)
    exact = amax if amax.device.type == "cpu" else amax.double()
    # a number divided by a tensor is the number times the reciprocal, rounded twice
    scale = torch.div(exact.new_full((), limit), exact).clamp(max=number("fp32")).float()
    scale = torch.where(_usable(amax), scale, 1.0)
    return power_of_2_floor(scale) if power_of_2 else scale


def _zeros(shape: Sequence[int], device: torch.device) -> Tensor:
    return torch.zeros(shape, dtype=torch.float32, device=device)  # scripts may have set another default dtype


def _usable(amax: Tensor) -> Tensor:
    return (amax > 0) & (amax < torch.inf)  # NaN is neither; isfinite takes a CPU five passes


def _countable(amax: Tensor) -> Tensor:
    """Return an amax (never negative), or 0 where it is not finite."""
    return amax.detach().nan_to_num(nan=0.0, posinf=0.0)


def inverse_of(scale: Tensor, amax: Tensor) -> Tensor:
    """Return ``1 / scale``, or NaN where ``amax`` is not finite: float32 of the shape of both."""
    return torch.where(amax < torch.inf, scale.reciprocal(), torch.nan)


class DelayedScale:
    """Delayed scaling of one operand of one layer: the scale of this step comes from the amax of earlier steps.

    As Transformer Engine's ``DelayedScaling``: the scale is ``limit / amax / 2**margin`` with ``amax`` the largest or
    the latest of the last ``length`` steps; a zero amax leaves history and scale as they are. Four differences. An
    entry of the history is a step of the optimizer: of all forwards since the last one (micro-batches, shared layers)
    the largest amax is noted, and the history rolls when the step is over (:mod:`autoprec.numerics.delayed`), where
    Transformer Engine rolls it with each forward. A non-finite amax is not noted: in Transformer Engine it stays in the
    history, and the scale with it, for ``length`` steps. And while there is no history each call uses its own amax
    (Transformer Engine uses scale 1, under which the first gradients underflow to zero, so that a short trial would
    measure the start-up and not the recipe). Evaluation, which notes nothing, saturates nothing: :meth:`wide_enough`.

    In a graph of ``torch.compile`` the scale is an input and ``seen`` an input that is updated: nothing else happens
    there, so that the cast waits for no reduction and costs one pass. What was seen is learned after the step, in a few
    kernels for all layers (:func:`learn_together`).

    Attributes:
        history: float32 ``[length]``, latest first, 0 where nothing has been seen; None before the first amax.
        scale: float32, 0-d, of the next call; 0 while there is no history.
        seen: the largest amax of this step, not learned yet (0: none), or None; float32, 0-d.
        started: there is a history.
        given: a graph traced from now on takes the scale as given, not from the amax it sees; it is not 0 any more.
    """

    __slots__ = ("algorithm", "given", "history", "length", "limit", "margin", "power_of_2", "scale", "seen", "started")

    def __init__(self, limit: float, *, length: int, algorithm: str, margin: int, power_of_2: bool = False) -> None:
        self.limit, self.length, self.algorithm = limit, length, algorithm
        self.margin, self.power_of_2 = margin, power_of_2
        self.history: Tensor | None = None
        self.scale: Tensor | None = None
        self.seen: Tensor | None = None
        self.started = self.given = False

    def _of(self, amax: Tensor, otherwise: Tensor | float) -> Tensor:
        scale = scale_of(amax, self.limit, power_of_2=self.power_of_2) * 2.0**-self.margin
        return torch.where(_usable(amax), scale, otherwise)

    def prepare(self, device: torch.device) -> None:
        """Make the tensors that a compiled graph reads and updates, on the device where it runs."""
        if self.history is None or self.scale is None:
            self.history, self.scale = _zeros([self.length], device), _zeros([], device)
        if self.seen is None:
            self.seen = _zeros([], device)
        self.history, self.scale, self.seen = (x.to(device) for x in (self.history, self.scale, self.seen))

    def wide_enough(self, scale: Tensor, amax: Tensor) -> Tensor:
        """Return a scale under which a tensor does not saturate: the given one, or its own where that is smaller.

        For evaluation. It may see what no training step has: other inputs, and weights that an average, an adapter or
        a pruning was written into.

        Args:
            scale: of the history, float32 of shape ``[]``.
            amax: of the tensor, likewise.

        Returns:
            Float32 of shape ``[]``.
        """
        return torch.minimum(scale, self._of(amax, scale))

    def traced(self, amax: Tensor, *, update: bool) -> Tensor:
        """Return the scale inside a graph, as :meth:`step` does; the amax is noted, see :func:`learn_together`.

        One difference: an operand first seen when other layers have a history starts at scale 1.

        Args:
            amax: of the tensor at hand, float32 of shape ``[]``.
            update: whether it is noted.

        Returns:
            Float32 of shape ``[]``.
        """
        if self.scale is None or self.seen is None:
            raise RuntimeError("DelayedScale.traced needs tensors made before the trace: call prepare first")
        scale = self.scale if self.given else torch.where(self.scale > 0, self.scale, self._of(amax, 1.0))
        if update:
            self.seen.copy_(torch.maximum(self.seen, _countable(amax)))
        return scale

    def step(self, amax: Tensor, *, update: bool) -> Tensor:
        """Return the scale of a tensor with this amax, both float32 of shape ``[]``; if ``update``, it is noted."""
        if not self.started and self.scale is not None:
            self.started = bool(self.scale > 0)  # waits for the device, in the first steps only
        scale = self.scale if self.started and self.scale is not None else self._of(amax, 1.0)
        if update:
            self.note(amax)
        return scale

    def note(self, amax: Tensor) -> None:
        """Keep an amax, float32 of shape ``[]``, in ``seen`` until the step is over."""
        found = _countable(amax)
        self.seen = found if self.seen is None else torch.maximum(self.seen, found)

    def roll(self) -> None:
        """Learn what this step has seen."""
        if self.seen is not None:
            self.learn(self.seen)

    def state(self, device: torch.device) -> dict[str, Tensor]:
        """Return history ``[length]``, scale and noted amax as float32, zeros for what is not there yet."""
        parts = {"history": self.history, "scale": self.scale, "seen": self.seen}
        empty = {name: _zeros([self.length] if name == "history" else [], device) for name in parts}
        return {name: empty[name] if part is None else part.clone() for name, part in parts.items()}

    def load_state(self, state: Mapping[str, Tensor], device: torch.device) -> None:
        """Continue from :meth:`state`; a history of another length keeps its latest entries.

        Args:
            state: ``history`` ``[length]``, ``scale`` ``[]`` and ``seen`` ``[]``, float32.
            device: on which the layer runs.
        """
        held = state["history"].to(device)[: self.length]
        self.history = torch.cat([held, held.new_zeros(self.length - held.numel())])
        self.scale, self.started = state["scale"].to(device, copy=True), False
        self.given = False  # it may be one of before the first amax
        self.seen = state["seen"].to(device, copy=True)

    def give(self) -> None:
        """Let graphs take the scale as given from now on; where nothing has been seen yet it is 1."""
        if not self.given and self.scale is not None:
            self.scale, self.given = torch.where(self.scale > 0, self.scale, 1.0), True

    def learn(self, amax: Tensor) -> None:
        """Take an amax into the history and compute the next scale; zero and non-finite ones teach nothing.

        Args:
            amax: the largest magnitude of a step, float32 of shape ``[]``.
        """
        self.seen = None if self.seen is None else torch.zeros_like(self.seen)
        if self.history is None or self.scale is None:
            self.history, self.scale = amax.new_zeros(self.length), amax.new_zeros(())
        rolled = torch.cat([amax.reshape(1), self.history[:-1]])
        self.history = torch.where(_usable(amax), rolled, self.history)
        latest = self.history[0] if self.algorithm == "most_recent" else self.history.amax()
        self.scale = self._of(latest, self.scale)


def learn_together(scales: Sequence[DelayedScale]) -> None:
    """Let prepared delayed scales learn what they have seen: in a few kernels for each kind of scale, not for each."""
    kinds: dict[tuple[Any, ...], list[DelayedScale]] = {}
    for one in scales:
        kinds.setdefault((one.limit, one.length, one.algorithm, one.margin, one.power_of_2), []).append(one)
    for alike in kinds.values():
        histories = [one.history for one in alike if one.history is not None]
        before = [one.scale for one in alike if one.scale is not None]
        seen = [one.seen for one in alike if one.seen is not None]
        amax, history = torch.stack(seen), torch.stack(histories)
        rolled = torch.cat([amax.unsqueeze(1), history[:, :-1]], 1)
        history = torch.where(_usable(amax).unsqueeze(1), rolled, history)
        latest = history[:, 0] if alike[0].algorithm == "most_recent" else history.amax(1)
        kept = torch.stack(before)
        found = alike[0]._of(latest, torch.where(kept > 0, kept, 1.0))
        # new tensors: the graphs of earlier forwards keep those that they used until their backward pass
        for one, scale in zip(alike, torch._foreach_mul(list(found.unbind()), 1.0), strict=True):
            one.scale, one.given = scale, True
        torch._foreach_copy_(histories, list(history.unbind()))
        torch._foreach_zero_(seen)
