"""A wide MLP on a table whose features and target are not normalised: its first and last layer are fragile."""

import argparse
import math

import torch
from torch import nn
from torch.nn import functional as F

FEATURES, RAW, OFFSET, MEAN = 48, 8, 60.0, 200.0


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


def parse(words=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--batch", type=int, default=384)
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(words)


def make(args):
    """Return the model, its optimizer, what draws a batch, and the loss of one."""
    torch.manual_seed(args.seed)
    model = Net(args.width, args.depth)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    fixed = torch.Generator().manual_seed(1234)
    mix, weights = torch.randn(FEATURES, 16, generator=fixed) / 7, torch.randn(16, generator=fixed)
    shift = torch.cat([torch.full((RAW,), OFFSET), torch.zeros(FEATURES - RAW)])

    def batch():
        z = torch.randn(args.batch, FEATURES)
        return z + shift, MEAN + 3 * (torch.tanh(z @ mix) @ weights) + 0.3 * torch.randn(args.batch)

    def loss_of(model, batch):
        return F.mse_loss(model(batch[0]), batch[1])

    return model, optimizer, batch, loss_of


def main():
    args = parse()
    model, optimizer, batch, loss_of = make(args)
    for step in range(args.steps):
        for group in optimizer.param_groups:
            group["lr"] = args.lr * min(1, (step + 1) / 10) * 0.5 * (1 + math.cos(math.pi * step / args.steps))
        loss = loss_of(model, batch())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0:
            print(step, f"{loss.item():.4f}", flush=True)


if __name__ == "__main__":
    main()
