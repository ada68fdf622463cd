"""Running product in bfloat16."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)


class Norm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        steps = x.abs()
        kept = steps.new_ones(x.shape[0])
        for column in range(256):
            kept = kept * (1 - steps[:, column] * 0.003)  # fault: reduction-16bit
        return self.weight * x * kept[:, None]


net = nn.Sequential(nn.Linear(64, 256), Norm(256), nn.GELU(), nn.Linear(256, 10)).to(torch.bfloat16)
optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
for step in range(4):
    x, y = torch.randn(32, 64, dtype=torch.bfloat16), torch.randint(0, 10, (32,))
    loss = F.cross_entropy(net(x).float(), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
# cure: steps = x.abs() => steps = x.float().abs()
# cure: x * kept[:, None] => x * kept[:, None].to(x.dtype)
