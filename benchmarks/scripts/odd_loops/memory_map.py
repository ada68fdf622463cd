"""State of the loop in memory that is shared by design: a memory map, a Value, shared tensors."""

import multiprocessing
import sys

import numpy
import torch
from torch import nn

torch.manual_seed(0)
kind = sys.argv[1] if len(sys.argv) > 1 else "memmap"
kept = {
    "memmap": lambda: numpy.memmap("priorities.bin", dtype="float32", mode="w+", shape=(8,)),
    "tensor": lambda: torch.zeros(8).share_memory_(),
    "value": lambda: multiprocessing.Array("f", 8),
}[kind]()
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step in range(40):
    x = torch.randn(8, 16)
    loss = (model(x) * (1 + 0.05 * float(kept[0])) - x.flip(1)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    kept[0] += 1
    print(f"step {step} loss {loss.item():.6f}", flush=True)
