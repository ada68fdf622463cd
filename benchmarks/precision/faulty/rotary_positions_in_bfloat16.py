"""Rotary positions in bfloat16."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)


class Attention(nn.Module):
    def __init__(self, width=64, heads=4):
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        half = width // heads // 2
        self.register_buffer("inv_freq", 1.0 / (10000.0 ** (torch.arange(half).float() / half)))

    def angles(self, x):
        position = torch.arange(x.shape[1], device=x.device).type_as(self.inv_freq)  # fault: positions-16bit
        return torch.outer(position, self.inv_freq)

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = (z.view(batch, length, self.heads, -1).transpose(1, 2) for z in self.qkv(x).chunk(3, -1))
        angle = self.angles(x)
        cos, sin = angle.cos().to(q.dtype), angle.sin().to(q.dtype)

        def turn(z):
            a, b = z.chunk(2, -1)
            return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)

        y = F.scaled_dot_product_attention(turn(q), turn(k), v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.attention, self.head = nn.Embedding(64, 64), Attention(), nn.Linear(64, 64)

    def forward(self, ids):
        return self.head(self.attention(self.embed(ids)))


net = Model()
net.attention.inv_freq = net.attention.inv_freq.bfloat16()
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
for step in range(4):
    ids = torch.randint(0, 64, (2, 600))
    logits = net(ids[:, :-1])
    loss = F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
# cure: net.attention.inv_freq.bfloat16() => net.attention.inv_freq.float()
