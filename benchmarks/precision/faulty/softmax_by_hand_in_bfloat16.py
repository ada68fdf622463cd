"""Softmax by hand in bfloat16."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)


class Norm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        score = x - x.amax(-1, keepdim=True)
        share = score.exp()
        share = share / share.sum(-1, keepdim=True)  # fault: softmax-16bit
        return self.weight * x * share


net = nn.Sequential(nn.Linear(64, 256), Norm(256), nn.GELU(), nn.Linear(256, 10)).to(torch.bfloat16)
optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
for step in range(4):
    x, y = torch.randn(32, 64, dtype=torch.bfloat16), torch.randint(0, 10, (32,))
    loss = F.cross_entropy(net(x).float(), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
# cure: score = x - x.amax => score = x.float() - x.float().amax
# cure: self.weight * x * share => self.weight * x * share.to(x.dtype)
