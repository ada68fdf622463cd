"""Rms norm by hand in bfloat16."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)


class Norm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)  # fault: norm-16bit


net = nn.Sequential(nn.Linear(64, 256), Norm(256), nn.GELU(), nn.Linear(256, 10)).to(torch.bfloat16)
optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
for step in range(4):
    x, y = torch.randn(32, 64, dtype=torch.bfloat16), torch.randint(0, 10, (32,))
    loss = F.cross_entropy(net(x).float(), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
# cure: return self.weight * x * torch.rsqrt(x.pow(2) => return self.weight * x.float() * torch.rsqrt(x.float().pow(2)
# cure: net(x).float() => net[3](net[2](net[1](net[0](x)).to(x.dtype))).float()
