"""A learning rate that warms up from zero: within the window of a trial nothing is learnt."""

import torch
from torch import nn

torch.manual_seed(17)
model = nn.Sequential(nn.Embedding(500, 32), nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 500))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 10000))
for step in range(30):
    tokens = torch.randint(0, 500, (64,))
    loss = nn.functional.cross_entropy(model(tokens), (tokens + 1) % 500)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()
    print(step, loss.item())
