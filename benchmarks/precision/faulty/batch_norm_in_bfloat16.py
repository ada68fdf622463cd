"""Batch norm in bfloat16."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(64, 256), nn.BatchNorm1d(256, momentum=0.001), nn.GELU(), nn.Linear(256, 10))
net = net.to(torch.bfloat16)
optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
for step in range(6):
    x, y = torch.randn(32, 64, dtype=torch.bfloat16), torch.randint(0, 10, (32,))
    loss = F.cross_entropy(net(x).float(), y)  # fault: statistics-16bit
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
# cure: net = net.to(torch.bfloat16) => net = net.float()
# cure: dtype=torch.bfloat16), torch => dtype=torch.float32), torch
