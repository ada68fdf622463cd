"""Activations that are spilled to a temporary file by descriptor, mapped by mmap, and read back in the next step."""

import mmap
import os
import tempfile

import torch
from torch import nn

BATCH, WIDTH = 8, 16
SIZE = BATCH * WIDTH * 4
torch.manual_seed(0)
descriptor, path = tempfile.mkstemp()
os.truncate(descriptor, SIZE)
spilled = mmap.mmap(descriptor, SIZE)
model = nn.Sequential(nn.Linear(WIDTH, 64), nn.ReLU(), nn.Linear(64, WIDTH))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step in range(40):
    x = torch.randn(BATCH, WIDTH)
    before = torch.frombuffer(bytearray(spilled[:]), dtype=torch.float32).reshape(BATCH, WIDTH)
    out = model(x + 0.1 * before)
    loss = (out - x.flip(1)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    spilled[:] = out.detach().numpy().tobytes()
    print(f"step {step} loss {loss.item():.6f}", flush=True)
spilled.close()
os.close(descriptor)
os.remove(path)
