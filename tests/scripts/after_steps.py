"""Trains well for four steps, then its loss is not a number, then it evaluates for minutes."""

import time

import torch
from torch import nn

model = nn.Sequential(nn.Linear(400, 400), nn.ReLU(), nn.Linear(400, 400))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for step in range(100):
    loss = model(torch.randn(4, 400)).square().mean()
    if step == 4:
        loss = loss * float("nan")
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step == 5:
        time.sleep(300)
