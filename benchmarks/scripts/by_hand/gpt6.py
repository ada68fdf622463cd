"""A GPT of six blocks over bytes, whose blocks are one class: what torch.compile makes of one serves them all."""

import torch
from task import Task, next_token, tokens
from torch import nn
from torch.nn import functional as F

WIDTH, HEADS, BLOCKS, LENGTH, BATCH = 384, 6, 6, 128, 8


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, width, heads, blocks):
        super().__init__()
        self.embed, self.place = nn.Embedding(256, width), nn.Parameter(torch.zeros(LENGTH, width))
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)

    def forward(self, x):
        x = self.embed(x) + self.place
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def make():
    """Return what is trained, and on what."""
    model = GPT(WIDTH, HEADS, BLOCKS)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    return Task(model, optimizer, tokens(BATCH, LENGTH + 1), next_token)
