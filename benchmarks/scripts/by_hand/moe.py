"""A language model whose feed-forward layers are eight experts, of which a token takes the best two."""

import torch
from task import Task, next_token, tokens
from torch import nn
from torch.nn import functional as F

WIDTH, DEPTH, HEADS, EXPERTS, TOP, BATCH, CONTEXT = 256, 3, 4, 8, 2, 8, 64


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)) for _ in range(EXPERTS)
        )

    def forward(self, x):
        flat = x.flatten(0, 1)
        shares, chosen = self.router(flat).softmax(-1).topk(TOP)
        mixed = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            rows, place = torch.where(chosen == number)
            weighted = expert(flat[rows]) * shares[rows, place, None]
            mixed = mixed.index_add(0, rows, weighted.to(mixed.dtype))
        return mixed.view_as(x)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj, self.experts = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), Experts()

    def forward(self, x):
        heads = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, WIDTH // HEADS)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.proj(mixed)
        return x + self.experts(self.norm2(x))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(DEPTH)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256, bias=False)

    def forward(self, tokens):
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        return self.head(self.norm(self.blocks(x)))


def make():
    """Return what is trained, and on what."""
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return Task(model, optimizer, tokens(BATCH, CONTEXT + 1), next_token, clip=1.0)
