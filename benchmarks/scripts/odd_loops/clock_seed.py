"""Seeds itself from the clock and from the operating system: two runs are never the same."""

import os
import time

import torch
from torch import nn

torch.manual_seed(int(time.time() * 1e6) % 2**31 + int.from_bytes(os.urandom(2), "little"))
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16))
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

for step in range(30):
    x = torch.randn(32, 16)
    loss = (model(x) - x.flip(1)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item())
