"""Tensors looked at on samples: what an error is, at a cost that does not grow with the tensor."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

#: Elements at which an error is looked at.
SAMPLE = 1 << 14


def sampled(tensor: Tensor, most: int = SAMPLE) -> Tensor:
    """Return up to ``most`` elements of a tensor of any shape, evenly spread, as one of shape ``[count]``.

    Which elements those are depends on the shape alone, and nothing is copied but they: a tensor's and its twin's are
    the same whatever their strides. Every so many-th is taken, an odd number: of a matrix all columns are looked at.
    """
    part, count = tensor.detach(), tensor.numel()
    if count <= most:
        return part.reshape(-1)
    every = -(-count // most) | 1
    if part.is_contiguous():
        return part.view(-1)[::every]
    return part[_places(part.shape, every, part.device)]


@functools.lru_cache(maxsize=64)
def _places(shape: torch.Size, every: int, device: torch.device) -> tuple[Tensor, ...]:
    return torch.unravel_index(torch.arange(0, shape.numel(), every, device=device), shape)


def relative_error(found: Tensor, wanted: Tensor) -> float:
    """Return ``|found - wanted| / |wanted|`` of tensors of one shape, over what is finite in both; 0 for nothing."""
    a, b = sampled(found).double(), sampled(wanted).double()
    size, error = float(b.norm()), float((a - b).norm())
    if not (size < float("inf") and error < float("inf")):
        both = a.isfinite() & b.isfinite()
        a, b = a[both], b[both]
        size, error = float(b.norm()), float((a - b).norm())
    return error / size if size else 0.0


def half_ulp(tensor: Tensor) -> Tensor:
    """Return half a unit in the last place of each element, float64 of the same shape: what is smaller is lost."""
    info = torch.finfo(tensor.dtype)
    size = tensor.detach().abs().double().clamp_min(info.tiny)
    return torch.exp2(torch.floor(torch.log2(size))) * info.eps / 2
