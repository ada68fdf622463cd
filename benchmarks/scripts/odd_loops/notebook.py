"""Cells of a notebook, one after another: a throw-away fit comes first, the real model later."""

import torch
from torch import nn

torch.manual_seed(8)
line = nn.Linear(64, 1)
optimizer = torch.optim.SGD(line.parameters(), lr=0.01)
for _ in range(3):
    optimizer.zero_grad()
    line(torch.randn(16, 64)).square().mean().backward()
    optimizer.step()

model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 64))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(40):
    x = torch.randn(64, 64)
    loss = (model(x) - x.roll(1, 1)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item())
