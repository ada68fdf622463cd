"""A wide MLP on a table whose features and target are not normalised: its first and last layer are fragile."""

import torch
from task import Task, cosine
from torch import nn
from torch.nn import functional as F

FEATURES, RAW, OFFSET, MEAN = 48, 8, 60.0, 200.0
WIDTH, DEPTH, BATCH = 1024, 4, 384


class Net(nn.Module):
    def __init__(self, width, depth):
        super().__init__()
        self.first = nn.Linear(FEATURES, width)
        self.hidden = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(depth))
        self.head = nn.Linear(width, 1)
        nn.init.constant_(self.head.bias, MEAN)

    def forward(self, x):
        x = self.first(x)
        for linear, norm in zip(self.hidden, self.norms, strict=True):
            x = x + F.gelu(linear(norm(x)))
        return self.head(x).squeeze(-1)


def make():
    """Return what is trained, and on what."""
    model = Net(WIDTH, DEPTH)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    fixed = torch.Generator().manual_seed(1234)
    mix, weights = torch.randn(FEATURES, 16, generator=fixed) / 7, torch.randn(16, generator=fixed)
    shift = torch.cat([torch.full((RAW,), OFFSET), torch.zeros(FEATURES - RAW)])

    def batch():
        z = torch.randn(BATCH, FEATURES)
        return z + shift, MEAN + 3 * (torch.tanh(z @ mix) @ weights) + 0.3 * torch.randn(BATCH)

    def loss_of(model, batch):
        return F.mse_loss(model(batch[0]), batch[1])

    return Task(
        model, optimizer, batch, loss_of, schedule=lambda step, steps: min(1, (step + 1) / 10) * cosine(step, steps)
    )
