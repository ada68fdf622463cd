"""Gradients of a whole model side by side: a flat float32 copy, and distances from it piece by piece."""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterator, Sequence

import torch

#: Values compared at a time: a temporary of a whole embedding could be the last free gigabyte of a GPU.
PIECE = 1 << 22


class Gradients:
    """Flat float32 copies of all gradients, ``slots`` of them, on the device of the parameters.

    With ``shared`` they lie in anonymous memory that forked children share (CPU only).
    """

    def __init__(self, parameters: list[torch.Tensor], slots: int, *, shared: bool = True) -> None:
        self._parameters = parameters
        self._sizes = [local_part(p).numel() for p in parameters]
        length = self.length = sum(self._sizes)
        if shared:
            self._memory = mmap.mmap(-1, max(length * slots * 4, 4))
            flat = torch.frombuffer(self._memory, dtype=torch.float32, count=max(length * slots, 1))
        else:
            flat = torch.zeros(max(length * slots, 1), device=parameters[0].device)
        self._slots = [flat[i * length : (i + 1) * length] for i in range(slots)]

    def _pieces(
        self, slot: int, unclip: dict[int, float], grads: Sequence[torch.Tensor | None] | None
    ) -> Iterator[tuple[torch.Tensor | None, float, torch.Tensor]]:
        found = [p.grad for p in self._parameters] if grads is None else grads
        targets = torch.split(self._slots[slot], self._sizes)
        for parameter, grad, target in zip(self._parameters, found, targets, strict=True):
            if grad is not None:
                grad = grad.to_dense() if grad.layout is not torch.strided else grad
                grad = grad.detach().reshape(-1)
            for start in range(0, target.numel(), PIECE):
                part = None if grad is None else grad[start : start + PIECE]
                yield part, unclip.get(id(parameter), 1.0), target[start : start + PIECE]

    def store(self, slot: int, unclip: dict[int, float], grads: Sequence[torch.Tensor | None] | None = None) -> None:
        """Copy the gradients of now (or ``grads``) into a slot, each times its factor; a missing one counts as zero."""
        for grad, factor, target in self._pieces(slot, unclip, grads):
            if grad is None:
                target.zero_()
            else:
                target.copy_(grad)
                if factor != 1.0:
                    target.mul_(factor)

    def compare(
        self, slot: int, unclip: dict[int, float], grads: Sequence[torch.Tensor | None] | None = None
    ) -> tuple[float, float]:
        """Return ``(||g - g_ref||^2, ||g_ref||^2)``; g are the gradients of now times their factors."""
        error = norm = 0.0
        for grad, factor, target in self._pieces(slot, unclip, grads):
            size = float(torch.dot(target, target))
            norm += size
            if grad is None:
                error += size
            else:
                difference = grad.float().mul(factor).sub_(target)
                error += float(torch.dot(difference, difference))
        return error, norm

    def square(self, slot: int) -> float:
        return math.fsum(self.squares(slot))

    def squares(self, slot: int) -> list[float]:
        return [
            math.fsum(float(torch.dot(piece, piece)) for piece in torch.split(one, PIECE))
            for one in torch.split(self._slots[slot], self._sizes)
        ]

    def fold(self, seen: int, unclip: dict[int, float], grads: Sequence[torch.Tensor | None] | None = None) -> float:
        """Take one more gradient into the mean of ``seen`` others, which slot 0 holds (at first: the reference).

        Returns what it adds to the sum of squared deviations from the mean (Welford): one copy serves all batches.
        """
        added = 0.0
        for grad, factor, mean in self._pieces(0, unclip, grads):
            difference = -mean if grad is None else grad.float().mul(factor).sub_(mean)
            added += float(torch.dot(difference, difference)) * seen / (seen + 1)
            mean.add_(difference, alpha=1.0 / (seen + 1))
        return added

    def spread(self, slots: int) -> tuple[float, float]:
        """Return the variance of the first ``slots`` gradients around their mean, and the square of the first."""
        stacked = self._slots[:slots]
        mean = torch.stack(stacked).mean(0)
        variance = sum(float(torch.dot(g - mean, g - mean)) for g in stacked) / (slots - 1)
        return variance, float(torch.dot(stacked[0], stacked[0]))


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a DTensor; any other tensor as it is."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def relative_error(error2: float, norm2: float) -> float:
    """``||g - g_ref|| / ||g_ref||`` from the two squares; NaN when the reference is zero."""
    return math.sqrt(error2 / norm2) if norm2 > 0 else float("nan")
