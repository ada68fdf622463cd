"""Variance by difference in bfloat16."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)


class Norm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        y = x + 20
        spread = (y * y).mean(0) - y.mean(0) ** 2  # fault: reduction-16bit
        return self.weight * x * (1 + spread)


net = nn.Sequential(nn.Linear(64, 256), Norm(256), nn.GELU(), nn.Linear(256, 10)).to(torch.bfloat16)
optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
for step in range(4):
    x, y = torch.randn(32, 64, dtype=torch.bfloat16), torch.randint(0, 10, (32,))
    loss = F.cross_entropy(net(x).float(), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
# cure: y = x + 20 => y = x.float() + 20
# cure: self.weight * x * (1 + spread) => self.weight * x * (1 + spread).to(x.dtype)
