"""The models of the horizon study: so small that a step takes a millisecond or two, trained to where they stop falling.

``gpt``: characters of the Python language reference (it ships with Python, as ``pydoc_data``), one block.
``vit``, ``mlp``: scikit-learn's handwritten digits, shifted and noisy; one block over 16 patches, or three layers.
``lstm``: the same characters; a recurrent layer, which has no 8-bit form and stays as it is, between linear ones.
``moe``: a made classification whose inputs are heavy-tailed, one batch in twenty with
outliers; two experts, softly mixed.

A run is fixed by its seed: initial weights, data order and noise. Runs of one seed are paired.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["TASKS", "Task", "rate", "seeded", "widened"]

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Task:
    """One model, ``wider`` times as wide as written here, with its data: ``batches`` yields batches without end."""

    name: str
    model: Callable[[int], nn.Module]
    batches: Callable[[torch.Generator], Iterator[Batch]]
    held_out: Callable[[], list[Batch]]
    lr: float
    head: str
    first: str
    recurrent: str = ""
    wider: int = 1

    @property
    def layers(self) -> dict[str, str]:
        """The layers that policies name."""
        return {"head": self.head, "first": self.first, "recurrent": self.recurrent}

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        logits = model(batch[0])
        return F.cross_entropy(logits.flatten(0, -2).float(), batch[1].flatten())

    @torch.no_grad()
    def validation(self, model: nn.Module) -> float:
        model.eval()
        losses = [float(self.loss(model, batch)) for batch in self.held_out()]
        model.train()
        return sum(losses) / len(losses)


def rate(step: int, steps: int) -> float:
    """The factor on the learning rate: 5 % of linear warm-up, then a cosine to a tenth."""
    warmup = max(1, steps // 20)
    if step < warmup:
        return (step + 1) / warmup
    return 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


class GPT(nn.Module):
    """One block: causal attention (its output is not projected again) and an MLP; no biases, as in large models."""

    causal = True

    def __init__(self, vocabulary: int, length: int, width: int = 32, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.embed, self.positions = nn.Embedding(vocabulary, width), nn.Parameter(torch.zeros(1, length, width))
        self.norm1, self.norm2 = nn.LayerNorm(width, bias=False), nn.LayerNorm(width, bias=False)
        self.norm = nn.LayerNorm(width, bias=False)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.block(self.embed(tokens) + self.positions)))

    def block(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + mixed.transpose(1, 2).reshape(batch, length, width)
        return x + self.down(F.relu(self.up(self.norm2(x))))


class ViT(GPT):
    """The same block over the 16 patches of a digit, all of which see each other; their mean is classified."""

    causal = False

    def __init__(self, width: int = 32, heads: int = 2) -> None:
        super().__init__(10, 16, width, heads)
        self.embed = nn.Linear(4, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        patches = x.view(-1, 4, 2, 4, 2).transpose(2, 3).reshape(len(x), 16, 4)
        return self.head(self.norm(self.block(self.embed(patches) + self.positions)).mean(1))


class MLP(nn.Module):
    """Three layers over the pixels of a digit."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.first, self.middle = nn.Linear(64, width, bias=False), nn.Linear(width, width, bias=False)
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.first(x))
        return self.head(x + F.relu(self.middle(x)))


class LSTM(nn.Module):
    """An LSTM between a linear layer and an MLP, over the same characters."""

    def __init__(self, vocabulary: int, width: int = 32) -> None:
        super().__init__()
        self.embed, self.into = nn.Embedding(vocabulary, width), nn.Linear(width, width)
        self.recurrent = nn.LSTM(width, width, batch_first=True)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.recurrent(self.into(self.embed(tokens)))[0]
        return self.head(x + self.down(F.relu(self.up(x))))


class MoE(nn.Module):
    """Two experts under a soft router; no norm stands between an outlier and a GEMM."""

    def __init__(self, inputs: int, classes: int, width: int = 48) -> None:
        super().__init__()
        self.embed, self.router = nn.Linear(inputs, width, bias=False), nn.Parameter(0.1 * torch.randn(width, 1))
        self.experts = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(2))
        self.head = nn.Linear(width, classes, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.embed(x))
        share = torch.sigmoid(x.detach() @ self.router)
        first, second = self.experts
        return self.head(x + torch.lerp(F.relu(first(x)), F.relu(second(x)), share))


# ------------------------------------------------------------------ text
_LENGTH, _VOCABULARY = 32, 96


@cache
def _text() -> Tensor:
    from pydoc_data.topics import topics

    text = "\n".join(topics[name] for name in sorted(topics)).encode("ascii", "replace")
    return torch.tensor([max(0, min(byte - 32, _VOCABULARY - 1)) for byte in text])


def _windows(text: Tensor, starts: Tensor) -> Batch:
    rows = text[starts[:, None] + torch.arange(_LENGTH + 1)]
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def _text_batches(generator: torch.Generator) -> Iterator[Batch]:
    text = _text()
    last = int(0.9 * len(text)) - _LENGTH - 1
    while True:
        yield _windows(text, torch.randint(0, last, (4,), generator=generator))


@cache
def _text_held_out() -> list[Batch]:
    text = _text()
    first = int(0.9 * len(text))
    starts = torch.linspace(first, len(text) - _LENGTH - 2, 1024).long()
    return [_windows(text, part) for part in starts.split(256)]


# ------------------------------------------------------------------ digits
@cache
def _digits() -> tuple[Tensor, Tensor]:
    from sklearn.datasets import load_digits

    digits = load_digits()
    return torch.tensor(digits.images, dtype=torch.float32) / 16 - 0.5, torch.tensor(digits.target)


def _changed(images: Tensor, generator: torch.Generator) -> Tensor:
    """Shift a batch by up to a pixel, and add noise: ``[images, 64]``."""
    moved = torch.roll(images, tuple(torch.randint(-1, 2, (2,), generator=generator).tolist()), (1, 2))
    return (moved + 0.4 * torch.randn(moved.shape, generator=generator)).flatten(1)


def _digit_batches(generator: torch.Generator) -> Iterator[Batch]:
    images, labels = _digits()
    while True:
        chosen = torch.randint(0, 1400, (48,), generator=generator)
        yield _changed(images[chosen], generator), labels[chosen]


@cache
def _digits_held_out() -> list[Batch]:
    images, labels = _digits()
    generator = torch.Generator().manual_seed(1234)
    return [(_changed(images[1400:], generator), labels[1400:]) for _ in range(8)]


# ------------------------------------------------------------------ heavy-tailed rows
_INPUTS, _CLASSES = 32, 8


def _rows(count: int, generator: torch.Generator, outliers: bool) -> Batch:
    """Rows whose labels four fixed random networks give, one for each quadrant of the first two inputs."""
    teacher = torch.Generator().manual_seed(7)
    hidden = torch.randn(4, _INPUTS, 32, generator=teacher) / math.sqrt(_INPUTS)
    out = torch.randn(4, 32, _CLASSES, generator=teacher)
    x = torch.randn(count, _INPUTS, generator=generator)
    kind = (x[:, 0] > 0).long() + 2 * (x[:, 1] > 0).long()
    logits = torch.einsum("rh,rhc->rc", torch.tanh(torch.einsum("ri,rih->rh", x, hidden[kind])), out[kind])
    labels = torch.multinomial(logits.softmax(-1), 1, generator=generator).squeeze(1)
    x = x * torch.exp(0.5 * torch.randn(count, 1, generator=generator))
    if outliers:
        x[:2] *= 30.0
    return x, labels


@cache
def _pool() -> Batch:
    return _rows(20_000, torch.Generator().manual_seed(11), False)


def _row_batches(generator: torch.Generator) -> Iterator[Batch]:
    x, labels = _pool()
    step = 0
    while True:
        chosen = torch.randint(0, len(x), (128,), generator=generator)
        rows = x[chosen].clone()
        if step % 20 == 19:
            rows[:2] *= 30.0
        step += 1
        yield rows, labels[chosen]


@cache
def _rows_held_out() -> list[Batch]:
    generator = torch.Generator().manual_seed(12)
    return [_rows(1024, generator, False) for _ in range(4)]


def gpt(by: int) -> nn.Module:
    return GPT(_VOCABULARY, _LENGTH, 32 * by, 2 * by)


def lstm(by: int) -> nn.Module:
    return LSTM(_VOCABULARY, 32 * by)


TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        Task("gpt", gpt, _text_batches, _text_held_out, 4e-3, "head", "qkv"),
        Task("lstm", lstm, _text_batches, _text_held_out, 4e-3, "head", "into", "recurrent"),
        Task("vit", lambda by: ViT(32 * by, 2 * by), _digit_batches, _digits_held_out, 3e-3, "head", "embed"),
        Task("mlp", lambda by: MLP(64 * by), _digit_batches, _digits_held_out, 3e-3, "head", "first"),
        Task("moe", lambda by: MoE(_INPUTS, _CLASSES, 48 * by), _row_batches, _rows_held_out, 3e-3, "head", "embed"),
    )
}


def widened(task: Task, by: int) -> Task:
    """Return a task whose model is so many times as wide, at a learning rate so many times smaller."""
    return task if by == 1 else replace(task, name=f"{task.name}, {by} x as wide", lr=task.lr / by, wider=by)


def seeded(task: Task, seed: int) -> tuple[nn.Module, Any]:
    """Return the model of a seed and its stream of batches."""
    torch.manual_seed(1000 + seed)
    return task.model(task.wider), task.batches(torch.Generator().manual_seed(2000 + seed))
