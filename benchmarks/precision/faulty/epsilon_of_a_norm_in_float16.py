"""Epsilon of a norm in float16."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)


class Norm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return self.weight * x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True).half() + 1e-8)  # fault: eps-zero


net = nn.Sequential(nn.Linear(64, 256), Norm(256), nn.GELU(), nn.Linear(256, 10)).to(torch.float16)
optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
for step in range(4):
    x, y = torch.randn(32, 64, dtype=torch.float16), torch.randint(0, 10, (32,))
    loss = F.cross_entropy(net(x).float(), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
# cure: 1e-8) => 1e-4)
