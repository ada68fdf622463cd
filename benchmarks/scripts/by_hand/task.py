"""What a training script trains, and on what: shared by the models of this folder."""

import math
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True)
class Task:
    """A model, its optimizer, what draws a batch, and the loss of one.

    ``clip`` is the largest norm of the gradient, ``schedule`` the learning rate's factor at a step of so many.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    batch: Callable[[], Any]
    loss_of: Callable[[Any, Any], torch.Tensor]
    clip: float | None = None
    schedule: Callable[[int, int], float] | None = None


def parts_of(batch: Any, count: int) -> list[Any]:
    """Return a batch in so many micro-batches: its tensors, whose first dimension is the batch, cut side by side."""
    if isinstance(batch, torch.Tensor):
        return list(batch.chunk(count))
    return list(zip(*(tensor.chunk(count) for tensor in batch), strict=True))


def cosine(step: int, steps: int) -> float:
    return 0.5 * (1 + math.cos(math.pi * step / steps))


def tokens(batch: int, length: int) -> Callable[[], torch.Tensor]:
    """Return what draws windows of bytes [batch, length] from Python's standard library."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:60]
    text = torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in files)), dtype=torch.uint8).long()
    return lambda: text[torch.randint(len(text) - length, (batch, 1)) + torch.arange(length)]


def next_token(model: nn.Module, window: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(window[:, :-1]).flatten(0, 1), window[:, 1:].flatten())


def blobs(batch: int, channels: int, size: int, classes: int) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
    """Return what draws noisy images [batch, channels, size, size] of one pattern per class, and their classes."""
    patterns = torch.randn(classes, channels, 8, 8, generator=torch.Generator().manual_seed(1234))

    def draw() -> tuple[torch.Tensor, torch.Tensor]:
        chosen = torch.randint(0, classes, (batch,))
        images = nn.functional.interpolate(patterns[chosen], size)
        return images * 0.5 + torch.randn(batch, channels, size, size), chosen

    return draw
