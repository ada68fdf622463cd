"""Running sum in a loop in bfloat16."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)


class Norm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        total = torch.zeros_like(x[:, 0])
        for column in range(x.shape[1]):
            total = total + x[:, column].abs()  # fault: reduction-16bit
        return self.weight * x / total[:, None]


net = nn.Sequential(nn.Linear(64, 256), Norm(256), nn.GELU(), nn.Linear(256, 10)).to(torch.bfloat16)
optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
for step in range(4):
    x, y = torch.randn(32, 64, dtype=torch.bfloat16), torch.randint(0, 10, (32,))
    loss = F.cross_entropy(net(x).float(), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
# cure: torch.zeros_like(x[:, 0]) => torch.zeros_like(x[:, 0]).float()
# cure: x / total[:, None] => x / total[:, None].to(x.dtype)
