"""15 plain PyTorch models that are hard to trace, each returning its loss, for benchmarks/graph/graph.py."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

BATCH, TOKENS, VOCAB, WIDTH, HEADS, DEPTH = 2, 16, 128, 64, 4, 2
Built = tuple[nn.Module, dict[str, Any]]


def _ids() -> Tensor:
    return torch.randint(3, VOCAB, (BATCH, TOKENS))


def _language() -> dict[str, Any]:
    return {"x": _ids(), "y": _ids()}


def _vectors() -> dict[str, Any]:
    return {"x": torch.randn(BATCH, WIDTH), "y": torch.tensor([1, 2])}


def _sequences() -> dict[str, Any]:
    return {"x": torch.randn(BATCH, TOKENS, WIDTH), "y": torch.tensor([1, 2])}


def _images() -> dict[str, Any]:
    return {"x": torch.randn(BATCH, 3, 32, 32), "y": torch.tensor([1, 2])}


class Translator(nn.Module):
    """nn.Transformer with a causal mask."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.core = nn.Transformer(WIDTH, HEADS, DEPTH, DEPTH, 128, batch_first=True)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(y.shape[1])
        h = self.core(self.embed(x), self.embed(y), tgt_mask=mask)
        return F.cross_entropy(self.out(h).flatten(0, 1), y.flatten())


class Recurrent(nn.Module):
    """A two-layer LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.rnn = nn.LSTM(WIDTH, WIDTH, 2, batch_first=True, dropout=0.1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.out(self.rnn(self.embed(x))[0]).flatten(0, 1), y.flatten())


class Residual(nn.Module):
    """Two convolutions, batch norms, in-place ReLU and in-place addition."""

    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        self.c1, self.b1 = nn.Conv2d(inner, outer, 3, stride, 1, bias=False), nn.BatchNorm2d(outer)
        self.c2, self.b2 = nn.Conv2d(outer, outer, 3, 1, 1, bias=False), nn.BatchNorm2d(outer)
        self.act = nn.ReLU(inplace=True)
        same = stride == 1 and inner == outer
        self.skip = (
            None if same else nn.Sequential(nn.Conv2d(inner, outer, 1, stride, bias=False), nn.BatchNorm2d(outer))
        )

    def forward(self, x: Tensor) -> Tensor:
        kept = x if self.skip is None else self.skip(x)
        x = self.b2(self.c2(self.act(self.b1(self.c1(x)))))
        x += kept
        return self.act(x)


class ResNet(nn.Module):
    """A small residual network."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, 1, 1), nn.BatchNorm2d(16), nn.ReLU())
        self.body, self.out = nn.Sequential(Residual(16, 16, 1), Residual(16, 32, 2)), nn.Linear(32, 10)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.out(F.adaptive_avg_pool2d(self.body(self.stem(x)), 1).flatten(1)), y)


class HandRMSNorm(nn.Module):
    """RMSNorm in four operators."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


class Attention(nn.Module):
    """Causal self-attention, fused or with a softmax written out."""

    def __init__(self, width: int, *, fused: bool) -> None:
        super().__init__()
        self.qkv, self.o = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.fused = fused

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, HEADS, d // HEADS).permute(2, 0, 3, 1, 4)
        if self.fused:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            a = (q @ k.transpose(-1, -2)) / math.sqrt(d // HEADS)
            a = a.masked_fill(torch.ones(t, t, dtype=torch.bool, device=x.device).triu(1), float("-inf"))
            e = (a - a.amax(-1, keepdim=True)).exp()
            out = (e / e.sum(-1, keepdim=True)) @ v
        return self.o(out.transpose(1, 2).reshape(b, t, d))


class Block(nn.Module):
    """Pre-norm transformer block."""

    def __init__(self, norm: Callable[[int], nn.Module], *, fused: bool) -> None:
        super().__init__()
        self.n1, self.n2, self.attn = norm(WIDTH), norm(WIDTH), Attention(WIDTH, fused=fused)
        self.fc, self.proj = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.n1(x))
        return x + self.proj(F.gelu(self.fc(self.n2(x))))


class GPT(nn.Module):
    """A GPT; ``reentrant`` None means no checkpointing."""

    def __init__(
        self, norm: Any = nn.LayerNorm, *, fused: bool = True, tied: bool = False, reentrant: bool | None = None
    ) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCAB, WIDTH), nn.Embedding(64, WIDTH)
        self.h = nn.ModuleList(Block(norm, fused=fused) for _ in range(DEPTH))
        self.norm, self.head = norm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        if tied:
            self.head.weight = self.wte.weight
        self.reentrant = reentrant

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.wte(x) + self.wpe(torch.arange(x.shape[1], device=x.device))
        for block in self.h:
            h = block(h) if self.reentrant is None else checkpoint(block, h, use_reentrant=self.reentrant)
        return F.cross_entropy(self.head(self.norm(h)).flatten(0, 1), y.flatten())


class Branching(nn.Module):
    """Control flow on data."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 10)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.a(x)
        h = h.relu() if h.mean() > 0 else self.b(h).tanh()
        positive = int((h > 0).sum())
        return F.cross_entropy(self.out(h) * (1 + positive * 1e-6), y)


class MultiHead(nn.Module):
    """nn.MultiheadAttention that returns its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.out = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True), nn.Linear(WIDTH, 10)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.out(self.a(x, x, x)[0].mean(1)), y)


class ConvNeXt(nn.Module):
    """Patchify, depthwise convolution, group norm, pointwise layers."""

    def __init__(self) -> None:
        super().__init__()
        self.c, self.dw = nn.Conv2d(3, 32, 4, 4), nn.Conv2d(32, 32, 7, padding=3, groups=32)
        self.g, self.p1, self.p2 = nn.GroupNorm(4, 32), nn.Linear(32, 128), nn.Linear(128, 32)
        self.out = nn.Linear(32, 10)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.c(x)
        h = self.g(self.dw(x)).permute(0, 2, 3, 1)
        x = x + self.p2(F.gelu(self.p1(h))).permute(0, 3, 1, 2)
        return F.cross_entropy(self.out(x.mean((2, 3))), y)


class Functional(nn.Module):
    """Raw weights: F.linear and einsum."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.w3 = (
            nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.05),
            nn.Parameter(torch.randn(4, WIDTH, WIDTH) * 0.05),
        )
        self.out = nn.Linear(WIDTH, 10)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = torch.einsum("bsd,edf->bsf", F.linear(x, self.w), self.w3)
        return F.cross_entropy(self.out(h.mean(1)), y)


class Product(torch.autograd.Function):
    """A linear layer as a custom function."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return grad @ w, grad.t() @ x


class Custom(nn.Module):
    """A custom autograd function with a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 10)
        self.w = nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.05)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.out(Product.apply(self.a(x), self.w)), y)


class Shared(nn.Module):
    """One layer called three times."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 10)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for _ in range(3):
            x = x + torch.tanh(self.a(x))
        return F.cross_entropy(self.out(x), y)


class Mixture(nn.Module):
    """Top-2 routing over a ModuleList of experts."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.out = nn.Linear(WIDTH, 4, bias=False), nn.Linear(WIDTH, 10)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 128), nn.GELU(), nn.Linear(128, WIDTH)) for _ in range(4)
        )

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        weight, chosen = self.gate(flat).softmax(-1).topk(2, -1)
        out = torch.zeros_like(flat)
        for index, expert in enumerate(self.experts):
            rows, slot = torch.where(chosen == index)
            out = out.index_add(0, rows, expert(flat[rows]) * weight[rows, slot, None])
        return F.cross_entropy(self.out(out.view_as(x).mean(1)), y)


class Averaged(nn.Module):
    """An EMA copy of the model lives inside it and is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, 10))
        self.ema = copy.deepcopy(self.net).requires_grad_(False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.net(x), y)


def _made(build: Callable[[], nn.Module], inputs: Callable[[], dict[str, Any]]) -> Callable[[], Built]:
    return lambda: (build().train(), inputs())


MODELS: dict[str, Callable[[], Built]] = {
    "nn.Transformer": _made(Translator, _language),
    "LSTM": _made(Recurrent, _language),
    "ResNet by hand": _made(ResNet, _images),
    "GPT tied": _made(lambda: GPT(tied=True), _language),
    "GPT hand softmax, RMSNorm": _made(lambda: GPT(HandRMSNorm, fused=False), _language),
    "GPT checkpointed": _made(lambda: GPT(reentrant=False), _language),
    "GPT checkpointed, reentrant": _made(lambda: GPT(reentrant=True), _language),
    "control flow on data": _made(Branching, _vectors),
    "nn.MultiheadAttention": _made(MultiHead, _sequences),
    "ConvNeXt, GroupNorm": _made(ConvNeXt, _images),
    "F.linear and einsum": _made(Functional, _sequences),
    "custom autograd function": _made(Custom, _vectors),
    "one layer called 3x": _made(Shared, _vectors),
    "MoE over a ModuleList": _made(Mixture, _sequences),
    "EMA copy inside": _made(Averaged, _vectors),
}
