"""Batches drawn with Python's random, as many notebooks do; nothing is seeded."""

import random

import torch
from torch import nn

data = [(torch.tensor([i % 7, i % 5, i % 3, 1.0]), float(i % 2)) for i in range(400)]
model = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

for step in range(30):
    rows = random.sample(data, 32)
    random.shuffle(rows)
    x = torch.stack([row[0] for row in rows])
    y = torch.tensor([[row[1]] for row in rows])
    loss = nn.functional.binary_cross_entropy_with_logits(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item())
