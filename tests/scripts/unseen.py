"""Calls model.forward directly: no module call is ever seen, only optimizer steps."""

import torch
import torch.nn as nn
import torch.nn.functional as F
from common import batch, log

torch.manual_seed(1)


class Flat(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(16, 32)
        self.b = nn.Linear(32, 10)

    def forward(self, x):
        return self.b.forward(torch.relu(self.a.forward(x)))


model = Flat()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(60):
    x, y = batch()
    loss = F.cross_entropy(model.forward(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    log(step, loss)
