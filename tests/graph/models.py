"""Small models for the tests of the operator graph; every one returns its loss from ``step()``."""

import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

WIDTH, HEADS, VOCAB, BATCH, TOKENS = 32, 4, 48, 2, 8


class RMSNorm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


class HandLayerNorm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        centred = x - x.mean(-1, keepdim=True)
        return centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * self.weight


class Attention(nn.Module):
    def __init__(self, width, fused):
        super().__init__()
        self.q_proj, self.k_proj = nn.Linear(width, width), nn.Linear(width, width)
        self.v_proj, self.o_proj = nn.Linear(width, width), nn.Linear(width, width)
        self.fused = fused

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = (p(x).view(b, t, HEADS, d // HEADS).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        if self.fused:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            scores = q @ k.transpose(-1, -2) / math.sqrt(d // HEADS)
            scores = scores - scores.amax(-1, keepdim=True)
            e = scores.exp()
            y = (e / e.sum(-1, keepdim=True)) @ v
        return self.o_proj(y.transpose(1, 2).reshape(b, t, d))


class Block(nn.Module):
    def __init__(self, width, norm, fused):
        super().__init__()
        self.n1, self.n2 = norm(width), norm(width)
        self.attn = Attention(width, fused)
        self.gate, self.up, self.down = nn.Linear(width, 64), nn.Linear(width, 64), nn.Linear(64, width)

    def forward(self, x):
        x = x + self.attn(self.n1(x))
        h = self.n2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Decoder(nn.Module):
    """A small decoder; ``reentrant`` None means no checkpointing."""

    def __init__(self, norm=nn.LayerNorm, fused=True, tied=False, reentrant=None, layers=2):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH, norm, fused) for _ in range(layers))
        self.norm, self.head = norm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.reentrant = reentrant

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(self.norm(x))


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1, self.w2 = nn.Linear(WIDTH, 64, bias=False), nn.Linear(64, WIDTH, bias=False)

    def forward(self, x):
        return self.w2(F.gelu(self.w1(x)))


class Mixture(nn.Module):
    """Top-1 routing over a ModuleList; the last expert is never chosen."""

    def __init__(self, experts=4):
        super().__init__()
        self.gate = nn.Linear(WIDTH, experts, bias=False)
        self.experts = nn.ModuleList(Expert() for _ in range(experts))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, x):
        logits = self.gate(x)
        logits = logits - 100.0 * (torch.arange(logits.shape[-1]) == logits.shape[-1] - 1)
        weight, chosen = logits.softmax(-1).topk(1, -1)
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            rows = (chosen[:, 0] == index).nonzero()[:, 0]
            if len(rows):
                out = out.index_add(0, rows, expert(x[rows]) * weight[rows])
        return self.head(out)


def token_batch():
    return torch.randint(VOCAB, (BATCH, TOKENS)), torch.randint(VOCAB, (BATCH * TOKENS,))


def decoder_step(model, ids=None, targets=None):
    """One forward and backward of a :class:`Decoder`."""
    if ids is None:
        ids, targets = token_batch()
    F.cross_entropy(model(ids).flatten(0, 1), targets).backward()
