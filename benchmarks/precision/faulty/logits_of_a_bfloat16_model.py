"""Logits of a bfloat16 model."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 8000)).bfloat16()
optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
for step in range(4):
    x, y = torch.randn(64, 64, dtype=torch.bfloat16), torch.randint(0, 8000, (64,))
    loss = F.cross_entropy(net(x), y)  # fault: loss-16bit
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
# cure: F.cross_entropy(net(x), y) => F.cross_entropy(net(x).float(), y)
