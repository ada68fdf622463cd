"""Batches from a numpy Generator that was made without a seed, and from the legacy functions."""

import numpy as np
import torch
from torch import nn

rng = np.random.default_rng()
model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 8))
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

for step in range(30):
    rows = rng.normal(size=(32, 8)) + np.random.normal(scale=0.1, size=(32, 8))
    x = torch.from_numpy(rows).float()
    loss = (model(x) - x.cumsum(1)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item())
