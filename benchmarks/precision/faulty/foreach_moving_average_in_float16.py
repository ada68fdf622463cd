"""Foreach moving average in float16."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 10))
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
average = [p.detach().half() for p in net.parameters()]
for step in range(6):
    x, y = torch.randn(32, 64), torch.randint(0, 10, (32,))
    loss = F.cross_entropy(net(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    torch._foreach_lerp_(average, [p.detach().half() for p in net.parameters()], 0.0001)  # fault: ema-16bit
# cure: [p.detach().half() for => [p.detach().clone() for
