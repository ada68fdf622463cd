"""Layer norm by hand in bfloat16."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)


class Norm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        centred = x - x.mean(-1, keepdim=True)
        variance = centred.pow(2).mean(-1, keepdim=True)  # fault: norm-16bit
        return self.weight * centred / (variance + 1e-5).sqrt()


net = nn.Sequential(nn.Linear(64, 256), Norm(256), nn.GELU(), nn.Linear(256, 10)).to(torch.bfloat16)
optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
for step in range(4):
    x, y = torch.randn(32, 64, dtype=torch.bfloat16), torch.randint(0, 10, (32,))
    loss = F.cross_entropy(net(x).float(), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
# cure: def forward(self, x): => def forward(self, x, dtype=torch.bfloat16):\n        x = x.float()
# cure: (variance + 1e-5).sqrt() => (variance + 1e-5).sqrt() if False else F.layer_norm(x, x.shape[-1:]).to(dtype)
