"""A language model of two LSTM layers (384 wide, 24 steps) on the bytes of Python's standard library."""

import torch
from task import Task, next_token, tokens
from torch import nn

WIDTH, DEPTH, BATCH, CONTEXT = 384, 2, 32, 24


class Net(nn.Module):
    def __init__(self, width, depth):
        super().__init__()
        self.tokens = nn.Embedding(256, width)
        self.lstm = nn.LSTM(width, width, depth, batch_first=True)
        self.head = nn.Linear(width, 256)

    def forward(self, tokens):
        return self.head(self.lstm(self.tokens(tokens))[0])


def make():
    """Return what is trained, and on what."""
    model = Net(WIDTH, DEPTH)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    return Task(model, optimizer, tokens(BATCH, CONTEXT + 1), next_token, clip=1.0)
