"""Sum of squares in float16."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)


class Norm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        big = x * 300
        size = (big * big).sum(-1, keepdim=True)  # fault: overflow-16bit
        return self.weight * x / (1 + size)


net = nn.Sequential(nn.Linear(64, 256), Norm(256), nn.GELU(), nn.Linear(256, 10)).to(torch.float16)
optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
for step in range(4):
    x, y = torch.randn(32, 64, dtype=torch.float16), torch.randint(0, 10, (32,))
    loss = F.cross_entropy(net(x).float(), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
# cure: big = x * 300 => big = x.float() * 300
# cure: self.weight * x / (1 + size) => (self.weight * x / (1 + size)).to(x.dtype)
