"""Small training loops of many kinds, for tests that compare a policy with what a person writes by hand.

Each entry of :data:`LOOPS` makes (model, batch(generator) -> tuple, loss_of(model, batch) -> scalar), on the CPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Loop = tuple[nn.Module, Callable[[torch.Generator], tuple[Tensor, ...]], Callable[[nn.Module, Any], Tensor]]


def _tokens(generator: torch.Generator, *shape: int, most: int = 64) -> Tensor:
    return torch.randint(0, most, shape, generator=generator)


class _Residual(nn.Module):
    def __init__(self, width: int, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(width, width, 3, padding=1, bias=False), norm(width)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm(self.conv(x)) + x)


class _Head(nn.Module):
    def __init__(self, body: nn.Module, width: int, classes: int) -> None:
        super().__init__()
        self.body, self.fc = body, nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.body(x).mean((2, 3)))


def conv_net() -> Loop:
    body = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), *(_Residual(16, nn.BatchNorm2d) for _ in range(2)))
    return (
        _Head(body, 16, 10),
        lambda g: (torch.randn(4, 3, 16, 16, generator=g), _tokens(g, 4, most=10)),
        lambda model, b: F.cross_entropy(model(b[0]), b[1]),
    )


class _Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.embed, self.rnn, self.head = nn.Embedding(64, 32), kind(32, 32, 2, batch_first=True), nn.Linear(32, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(self.embed(x))[0])


def _next_token(model: nn.Module, b: tuple[Tensor]) -> Tensor:
    return F.cross_entropy(model(b[0][:, :-1]).flatten(0, 1), b[0][:, 1:].flatten())


def lstm() -> Loop:
    return _Recurrent(nn.LSTM), lambda g: (_tokens(g, 4, 13),), _next_token


def gru() -> Loop:
    return _Recurrent(nn.GRU), lambda g: (_tokens(g, 4, 13),), _next_token


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = self.qkv(self.n1(x)).view(b, t, 3, 4, c // 4).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, c))
        return x + self.mlp(self.n2(x))


class _Gpt(nn.Module):
    def __init__(self, *, own_loss: bool) -> None:
        super().__init__()
        self.own_loss, self.embed = own_loss, nn.Embedding(64, 32)
        self.blocks, self.norm = nn.ModuleList(_Block(32) for _ in range(2)), nn.LayerNorm(32)
        self.head = nn.Linear(32, 64, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x[:, :-1] if self.own_loss else x)
        for block in self.blocks:
            h = block(h)
        logits = self.head(self.norm(h))
        return F.cross_entropy(logits.flatten(0, 1), x[:, 1:].flatten()) if self.own_loss else logits


def gpt() -> Loop:
    return _Gpt(own_loss=False), lambda g: (_tokens(g, 2, 17),), _next_token


def gpt_own_loss() -> Loop:
    return _Gpt(own_loss=True), lambda g: (_tokens(g, 2, 17),), lambda model, b: model(b[0])


def encoder() -> Loop:
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    model = nn.Sequential(nn.Embedding(64, 32), nn.TransformerEncoder(layer, 2), nn.Linear(32, 64))
    return model, lambda g: (_tokens(g, 4, 13),), _next_token


def tabular() -> Loop:
    model = nn.Sequential(
        nn.Linear(24, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)
    )
    return (
        model,
        lambda g: (torch.randn(32, 24, generator=g) + 20, 200 + torch.randn(32, generator=g)),
        lambda model, b: F.mse_loss(model(b[0]).squeeze(-1), b[1]),
    )


class _Unet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.time, self.first = (
            nn.Sequential(nn.Linear(16, 32), nn.SiLU(), nn.Linear(32, 16)),
            nn.Conv2d(3, 16, 3, 1, 1),
        )
        self.down, self.middle = nn.Conv2d(16, 32, 4, 2, 1), _Residual(32, lambda c: nn.GroupNorm(4, c))
        self.up, self.last = nn.ConvTranspose2d(32, 16, 4, 2, 1), nn.Conv2d(32, 3, 3, padding=1)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        angle = t[:, None] * torch.exp(torch.arange(8) * -(math.log(1e4) / 7))
        h = self.first(x) + self.time(torch.cat([angle.sin(), angle.cos()], 1))[:, :, None, None]
        inside = F.interpolate(self.middle(self.down(h)), scale_factor=1)
        return self.last(torch.cat([h, self.up(inside)], 1))


def unet() -> Loop:
    return (
        _Unet(),
        lambda g: (torch.randn(2, 3, 16, 16, generator=g), torch.rand(2, generator=g) * 1000),
        lambda model, b: F.mse_loss(model(*b), b[0]),
    )


class _Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router, self.head = nn.Linear(32, 4), nn.Linear(32, 64)
        self.embed, self.experts = nn.Embedding(64, 32), nn.ModuleList(nn.Linear(32, 32) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        weights, chosen = self.router(h).softmax(-1).topk(2)
        out = sum(
            (weights * (chosen == i)).sum(-1, keepdim=True) * F.silu(expert(h)) for i, expert in enumerate(self.experts)
        )
        return self.head(h + out)


def mixture_of_experts() -> Loop:
    return _Mixture(), lambda g: (_tokens(g, 4, 13),), _next_token


class _Llama(nn.Module):
    """RMSNorm and a gate, written by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.gain, self.head = nn.Embedding(64, 32), nn.Parameter(torch.ones(32)), nn.Linear(32, 64)
        self.gate, self.up, self.down = nn.Linear(32, 64), nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        n = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6) * self.gain
        return self.head(h + self.down(F.silu(self.gate(n)) * self.up(n)))


def llama() -> Loop:
    return _Llama(), lambda g: (_tokens(g, 4, 13),), _next_token


class _Vae(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(64, 32), nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 64))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log_var = self.encode(x).chunk(2, 1)
        return self.decode(mean + torch.exp(0.5 * log_var) * x[:, :16]), mean, log_var


def _evidence_bound(model: nn.Module, b: tuple[Tensor]) -> Tensor:
    logits, mean, log_var = model(b[0])
    kl = -0.5 * torch.mean(1 + log_var - mean.pow(2) - log_var.exp())
    return F.binary_cross_entropy_with_logits(logits, b[0]) + 0.1 * kl


def vae() -> Loop:
    return _Vae(), lambda g: (torch.rand(8, 64, generator=g),), _evidence_bound


def audio() -> Loop:
    model = nn.Sequential(nn.Conv1d(1, 8, 9, 4, 4), nn.GELU(), nn.GroupNorm(2, 8), nn.ConvTranspose1d(8, 1, 8, 4, 2))
    return (
        model,
        lambda g: (torch.randn(4, 1, 64, generator=g),),
        lambda model, b: F.smooth_l1_loss(model(b[0]), b[0]),
    )


def mixer() -> Loop:
    model = nn.Sequential(nn.Conv2d(3, 16, 4, 4), nn.GELU(), nn.Flatten(2), nn.Linear(16, 16), nn.Dropout(0.1))
    return (
        model,
        lambda g: (torch.randn(4, 3, 16, 16, generator=g), torch.randn(4, 16, 16, generator=g)),
        lambda model, b: F.huber_loss(model(b[0]), b[1]),
    )


#: Name to what makes a loop; each is made anew under the seed that the caller has set.
LOOPS: dict[str, Callable[[], Loop]] = {
    make.__name__: make
    for make in (
        *(conv_net, lstm, gru, gpt, gpt_own_loss, encoder, tabular, unet),
        *(mixture_of_experts, llama, vae, audio, mixer),
    )
}
