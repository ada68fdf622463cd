"""Averaged model in bfloat16."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
import copy

net = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 10))
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
average = copy.deepcopy(net).to(torch.bfloat16)
for step in range(6):
    x, y = torch.randn(32, 64), torch.randint(0, 10, (32,))
    loss = F.cross_entropy(net(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        for a, p in zip(average.parameters(), net.parameters()):
            a.lerp_(p.to(a.dtype), 0.001)  # fault: ema-16bit
# cure: copy.deepcopy(net).to(torch.bfloat16) => copy.deepcopy(net)
