"""Adam s epsilon in float16."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 10))
net = net.half()
optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)  # fault: eps-zero
for step in range(4):
    x, y = torch.randn(32, 64), torch.randint(0, 10, (32,))
    loss = F.cross_entropy(net(x.half()).float(), y) * 1024
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
# cure: lr=1e-3) => lr=1e-3, eps=1e-4)
