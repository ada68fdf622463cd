"""A small model and data for the scripts beside this file; knows nothing of AutoPrec."""

import torch
import torch.nn as nn


class Net(nn.Module):
    def __init__(self, width=32, classes=10):
        super().__init__()
        self.up = nn.Linear(16, width)
        self.mid = nn.Linear(width, width)
        self.head = nn.Linear(width, classes)
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        return self.head(self.drop(torch.tanh(self.mid(torch.relu(self.up(x))))))


def batch(size=8):
    return torch.randn(size, 16), torch.randint(0, 10, (size,))


def log(step, loss):
    print(f"step {step} loss {float(loss):.6f}", flush=True)
