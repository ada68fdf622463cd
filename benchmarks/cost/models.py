"""Small transformers whose peak memory ``peak.py`` measures."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    """Pre-norm transformer block."""

    def __init__(self, width: int, heads: int, *, causal: bool, gated: bool = False, norm: Any = nn.LayerNorm) -> None:
        super().__init__()
        self.ln1, self.ln2 = norm(width), norm(width)
        self.q, self.k, self.v = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.o = nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.gate = nn.Linear(width, 4 * width) if gated else None
        self.heads, self.causal = heads, causal

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, width = x.shape
        h = self.ln1(x)
        q, k, v = (f(h).view(batch, seq, self.heads, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.o(y.transpose(1, 2).reshape(batch, seq, width))
        h = self.ln2(x)
        up = self.up(h)
        return x + self.down(F.silu(self.gate(h)) * up if self.gate is not None else F.gelu(up))


class Decoder(nn.Module):
    """GPT or Llama-like language model."""

    def __init__(self, width: int, depth: int, heads: int, vocab: int, seq: int, *, gated: bool = False) -> None:
        super().__init__()
        norm = nn.RMSNorm if gated else nn.LayerNorm
        self.embed, self.position = nn.Embedding(vocab, width), nn.Embedding(seq, width)
        self.h = nn.ModuleList(Block(width, heads, causal=True, gated=gated, norm=norm) for _ in range(depth))
        self.norm, self.head = norm(width), nn.Linear(width, vocab, bias=False)

    def forward(self, ids: Tensor, target: Tensor) -> Tensor:
        x = self.embed(ids) + self.position(torch.arange(ids.shape[1]))
        for block in self.h:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), target.flatten())


class Encoder(nn.Module):
    """Vision transformer or text classifier over patches."""

    def __init__(self, width: int, depth: int, heads: int, patch: int, classes: int) -> None:
        super().__init__()
        self.patch = nn.Linear(patch, width)
        self.h = nn.ModuleList(Block(width, heads, causal=False) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        x = self.patch(x)
        for block in self.h:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x).mean(1)).float(), target)
