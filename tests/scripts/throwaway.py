"""A notebook's first cell fits a small model for three steps; the real model comes after it."""

import torch
import torch.nn as nn
import torch.nn.functional as F
from common import Net, batch, log

torch.manual_seed(1)
probe = nn.Linear(64, 1)
warm_up = torch.optim.SGD(probe.parameters(), lr=0.01)
for _ in range(3):
    warm_up.zero_grad()
    probe(torch.randn(4, 64)).square().mean().backward()
    warm_up.step()

model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(60):
    x, y = batch()
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    log(step, loss)
