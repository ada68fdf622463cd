"""Sgd with momentum on bfloat16 weights."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 10))
net.to(torch.bfloat16)  # fault: updates-lost
optimizer = torch.optim.SGD(net.parameters(), lr=1e-3, momentum=0.9)
for step in range(6):
    x, y = torch.randn(32, 64), torch.randint(0, 10, (32,))
    loss = F.cross_entropy(net(x.to(torch.bfloat16)).float(), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
# cure: net.to(torch.bfloat16) => net.float()
# cure: x.to(torch.bfloat16) => x
