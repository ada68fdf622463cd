"""Scales: from the largest magnitude of a tensor, row or block, now or from past steps.

A scale multiplies values before rounding; its inverse multiplies the result. Non-finite input gives a NaN inverse, so
that it shows in the output instead of silently saturating. Sources: torchao ``float8_utils.amax_to_scale``;
Transformer Engine ``recipe/delayed_scaling.cu`` and ``DelayedScaling``.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

__all__ = ["DelayedScale", "amax_of", "inverse_of", "power_of_2_floor", "scale_of"]

_FP32_MAX = torch.finfo(torch.float32).max


def amax_of(x: Tensor, axis: int | None = None) -> Tensor:
    """Return the largest magnitude as float32: 0-d, or along ``axis`` with that dimension kept; NaN propagates."""
    if x.numel() == 0:
        shape = [] if axis is None else [1 if d == axis % x.ndim else n for d, n in enumerate(x.shape)]
        return x.new_zeros(shape, dtype=torch.float32)
    if axis is None:
        low, high = torch.aminmax(x)
        return torch.maximum(-low, high).float()
    return x.abs().amax(axis, keepdim=True).float()


def power_of_2_floor(scale: Tensor) -> Tensor:
    """Round positive normal float32 values down to a power of two, exactly."""
    return (scale.view(torch.int32) & 0x7F800000).view(torch.float32)


def scale_of(amax: Tensor, limit: float, *, power_of_2: bool = False, epsilon: float = 0.0) -> Tensor:
    """Return the float32 scale that brings ``amax`` to ``limit`` (1 for all-zero and non-finite tensors).

    The quotient is rounded once, as torchao's division in float64 rounds it: on a CPU float32 division does that by
    itself (and a compiler that computes the scale anew for every value does it eight times faster), Triton's does not.
    A scale beyond float32 becomes its largest value.
    """
    if epsilon:
        amax = amax.clamp(min=epsilon)
    exact = amax if amax.device.type == "cpu" else amax.double()
    # a number divided by a tensor is the number times the reciprocal, rounded twice
    scale = torch.div(exact.new_full((), limit), exact).clamp(max=_FP32_MAX).float()
    scale = torch.where(_usable(amax), scale, 1.0)
    return power_of_2_floor(scale) if power_of_2 else scale


def _usable(amax: Tensor) -> Tensor:
    return torch.isfinite(amax) & (amax > 0)


def inverse_of(scale: Tensor, amax: Tensor) -> Tensor:
    """Return ``1 / scale``, or NaN where ``amax`` is not finite."""
    return torch.where(torch.isfinite(amax), scale.reciprocal(), torch.nan)


class DelayedScale:
    """Delayed scaling of one operand of one layer: the scale of this step comes from the amax of earlier steps.

    As Transformer Engine's ``DelayedScaling``: the scale is ``limit / amax / 2**margin`` with ``amax`` the largest or
    the latest of the last ``length`` steps; a zero amax leaves history and scale as they are. Two differences. A
    non-finite amax does so as well: in Transformer Engine it stays in the history, and the scale with it, for
    ``length`` steps. And while there is no history each call uses its own amax (Transformer Engine uses scale 1, under
    which the first gradients underflow to zero, so that a short trial would measure the start-up and not the recipe).

    Attributes:
        history: float32 ``[length]``, latest first, 0 where nothing has been seen; None before the first amax.
        scale: float32, 0-d, of the next call; 0 while there is no history.
        seen: the largest amax noted since ranks last compared theirs, or None.
    """

    __slots__ = ("algorithm", "history", "length", "limit", "margin", "power_of_2", "scale", "seen", "started")

    def __init__(self, limit: float, *, length: int, algorithm: str, margin: int, power_of_2: bool = False) -> None:
        self.limit, self.length, self.algorithm = limit, length, algorithm
        self.margin, self.power_of_2 = margin, power_of_2
        self.history: Tensor | None = None
        self.scale: Tensor | None = None
        self.seen: Tensor | None = None
        self.started = False

    def _of(self, amax: Tensor, otherwise: Tensor | float) -> Tensor:
        scale = scale_of(amax, self.limit, power_of_2=self.power_of_2) * 2.0**-self.margin
        return torch.where(_usable(amax), scale, otherwise)

    def step(self, amax: Tensor, *, update: bool, shared: bool = False) -> Tensor:
        """Return the scale to use for a tensor whose amax is ``amax``; then, if ``update``, take the amax in."""
        if not self.started and self.scale is not None:
            self.started = bool(self.scale > 0)  # waits for the device, in the first steps only
        scale = self.scale if self.started and self.scale is not None else self._of(amax, 1.0)
        if update:
            self.take(amax, shared=shared)
        return scale

    def take(self, amax: Tensor, *, shared: bool = False) -> None:
        """Learn from an amax, or (``shared``) only note it in ``seen`` until ranks have compared theirs."""
        if shared:
            self.seen = amax.detach() if self.seen is None else torch.maximum(self.seen, amax.detach())
        else:
            self.learn(amax.detach())

    def state(self, device: torch.device) -> dict[str, Tensor]:
        """Return history ``[length]``, scale and noted amax as float32, zeros for what is not there yet."""
        parts = {"history": self.history, "scale": self.scale, "seen": self.seen}
        empty = {name: torch.zeros([self.length] if name == "history" else [], device=device) for name in parts}
        return {name: empty[name] if part is None else part.clone() for name, part in parts.items()}

    def load_state(self, state: Mapping[str, Tensor], device: torch.device) -> None:
        """Continue from :meth:`state`; a history of another length keeps its latest entries."""
        held = state["history"].to(device)[: self.length]
        self.history = torch.cat([held, held.new_zeros(self.length - held.numel())])
        self.scale, self.started = state["scale"].to(device, copy=True), False
        self.seen = state["seen"].to(device, copy=True) if state["seen"] > 0 else None

    def learn(self, amax: Tensor) -> None:
        """Take an amax into the history and compute the next scale; zero and non-finite ones teach nothing."""
        self.seen = None
        if self.history is None or self.scale is None:
            self.history, self.scale = amax.new_zeros(self.length), amax.new_zeros(())
        rolled = torch.cat([amax.reshape(1), self.history[:-1]])
        self.history = torch.where(_usable(amax), rolled, self.history)
        latest = self.history[0] if self.algorithm == "most_recent" else self.history.amax()
        self.scale = self._of(latest, self.scale)
