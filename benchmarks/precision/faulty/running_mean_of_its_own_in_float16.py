"""Running mean of its own in float16."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)


class Centre(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.register_buffer("mean", torch.ones(width, dtype=torch.float16))

    def forward(self, x):
        with torch.no_grad():
            self.mean.mul_(0.9999).add_(x.mean(0).half(), alpha=0.0001)  # fault: statistics-16bit
        return x - self.mean.float()


net = nn.Sequential(nn.Linear(64, 256), Centre(256), nn.GELU(), nn.Linear(256, 10))
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
for step in range(6):
    x, y = torch.randn(32, 64), torch.randint(0, 10, (32,))
    loss = F.cross_entropy(net(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
# cure: torch.ones(width, dtype=torch.float16) => torch.ones(width)
# cure: x.mean(0).half() => x.mean(0)
