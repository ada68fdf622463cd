"""A language model of two LSTM layers (384 wide, 24 steps) on the bytes of Python's standard library."""

import argparse
import sysconfig
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F


class Net(nn.Module):
    def __init__(self, width, depth):
        super().__init__()
        self.tokens = nn.Embedding(256, width)
        self.lstm = nn.LSTM(width, width, depth, batch_first=True)
        self.head = nn.Linear(width, 256)

    def forward(self, tokens):
        return self.head(self.lstm(self.tokens(tokens))[0])


def parse(words=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--depth", type=int, default=2)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--context", type=int, default=24)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(words)


def make(args):
    """Return the model, its optimizer, what draws a batch, and the loss of one."""
    torch.manual_seed(args.seed)
    model = Net(args.width, args.depth)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:60]
    text = torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in files)), dtype=torch.uint8).long()
    offsets = torch.arange(args.context + 1)

    def batch():
        return text[torch.randint(len(text) - args.context - 1, (args.batch, 1)) + offsets]

    def loss_of(model, window):
        return F.cross_entropy(model(window[:, :-1]).flatten(0, 1), window[:, 1:].flatten())

    return model, optimizer, batch, loss_of


def main():
    args = parse()
    model, optimizer, batch, loss_of = make(args)
    for step in range(args.steps):
        loss = loss_of(model, batch())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 20 == 0:
            print(step, f"{loss.item():.4f}", flush=True)


if __name__ == "__main__":
    main()
