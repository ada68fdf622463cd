"""Gradients of a whole model side by side: a flat float32 copy, and distances from it piece by piece."""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from autoprec.numerics.sharded import is_dtensor

#: Values compared at a time: a temporary of a whole embedding could be the last free gigabyte of a GPU.
PIECE = 1 << 22


class Gradients:
    """A flat float32 copy of all gradients, on the device of the parameters.

    With ``shared`` it lies in anonymous memory that forked children share (CPU only). Where a parameter is sharded,
    squares are those of this rank: all ranks together add up to the whole model, replicated parameters counted once.
    """

    def __init__(self, parameters: list[torch.Tensor], *, shared: bool = True) -> None:
        self._parameters = parameters
        self._sizes = [local_part(p).numel() * (2 if p.is_complex() else 1) for p in parameters]
        self._roots = [math.sqrt(_share(p)) for p in parameters] if any(map(is_dtensor, parameters)) else None
        length = sum(self._sizes)
        if shared:
            memory = mmap.mmap(-1, max(length * 4, 4))
            self._kept = torch.frombuffer(memory, dtype=torch.float32, count=max(length, 1))[:length]
        else:
            self._kept = torch.zeros(length, device=parameters[0].device)

    def leave_shared(self) -> None:
        """Go on with a copy of this process's own."""
        self._kept = self._kept.clone()

    def _pieces(
        self, unclip: dict[int, float], grads: Sequence[torch.Tensor | None] | None
    ) -> Iterator[tuple[torch.Tensor | None, float, torch.Tensor]]:
        found = [p.grad for p in self._parameters] if grads is None else grads
        targets = torch.split(self._kept, self._sizes)
        roots = self._roots or [1.0] * len(targets)
        for parameter, grad, target, root in zip(self._parameters, found, targets, roots, strict=True):
            if grad is not None:
                grad = grad.to_dense() if grad.layout is not torch.strided else grad
                grad = grad.detach()
                grad = torch.view_as_real(grad.resolve_conj()) if grad.is_complex() else grad
                grad = grad.reshape(-1)
            for start in range(0, target.numel(), PIECE):
                part = None if grad is None else grad[start : start + PIECE]
                yield part, unclip.get(id(parameter), 1.0) * root, target[start : start + PIECE]

    def store(self, unclip: dict[int, float], grads: Sequence[torch.Tensor | None] | None = None) -> None:
        """Keep the gradients of now (or ``grads``), each times its factor; a missing one counts as zero.

        Args:
            unclip: factor of each parameter's gradient, by its ``id``.
            grads: gradients of the parameters' shapes, in their order; default: those of now.
        """
        for grad, factor, target in self._pieces(unclip, grads):
            if grad is None:
                target.zero_()
            else:
                target.copy_(grad)
                if factor != 1.0:
                    target.mul_(factor)

    def compare(
        self, unclip: dict[int, float], grads: Sequence[torch.Tensor | None] | None = None
    ) -> tuple[float, float]:
        """Return ``(||g - g_ref||^2, ||g_ref||^2)``; g are the gradients of now times their factors.

        Args:
            unclip: factor of each parameter's gradient, by its ``id``.
            grads: gradients of the parameters' shapes, in their order; default: those of now.
        """
        error = norm = 0.0
        for grad, factor, target in self._pieces(unclip, grads):
            size = float(torch.dot(target, target))
            norm += size
            if grad is None:
                error += size
            else:
                difference = grad.float().mul(factor).sub_(target)
                error += float(torch.dot(difference, difference))
        return error, norm

    def squares(self) -> list[float]:
        """Return the squared norm of each parameter's kept gradient."""
        return [
            math.fsum(float(torch.dot(piece, piece)) for piece in torch.split(one, PIECE))
            for one in torch.split(self._kept, self._sizes)
        ]

    def fold(self, seen: int, unclip: dict[int, float], grads: Sequence[torch.Tensor | None] | None = None) -> float:
        """Take one more gradient into the mean of ``seen`` others, which is kept (at first: the reference).

        Returns what it adds to the sum of squared deviations from the mean (Welford): one copy serves all batches.

        Args:
            seen: how many there were before.
            unclip: factor of each parameter's gradient, by its ``id``.
            grads: gradients of the parameters' shapes, in their order; default: those of now.
        """
        added = 0.0
        for grad, factor, mean in self._pieces(unclip, grads):
            difference = -mean if grad is None else grad.float().mul(factor).sub_(mean)
            added += float(torch.dot(difference, difference)) * seen / (seen + 1)
            mean.add_(difference, alpha=1.0 / (seen + 1))
        return added


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a DTensor, summed over ranks where that is still to be done; others as they are.

    Args:
        tensor: a tensor of any shape and dtype.
    """
    if not is_dtensor(tensor):
        return tensor
    sharded: Any = tensor
    if any(placement.is_partial() for placement in sharded.placements):  # of norms under sequence parallelism
        from torch.distributed.tensor import Replicate

        whole = [Replicate() if placement.is_partial() else placement for placement in sharded.placements]
        sharded = sharded.redistribute(placements=whole)
    return sharded.to_local()  # type: ignore[no-any-return]


def _share(parameter: Any) -> float:
    """Return by what a rank's squares are multiplied before all ranks' are summed: 1 over the ranks that hold them."""
    parts = 1
    if is_dtensor(parameter):
        sizes = parameter.device_mesh.shape
        parts = math.prod(n for n, one in zip(sizes, parameter.placements, strict=True) if not one.is_replicate())
    return parts / torch.distributed.get_world_size()


def relative_error(error2: float, norm2: float) -> float:
    """``||g - g_ref|| / ||g_ref||`` from the two squares; NaN when the reference is zero."""
    return math.sqrt(error2 / norm2) if norm2 > 0 else float("nan")
