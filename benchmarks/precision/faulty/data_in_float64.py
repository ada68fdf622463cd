"""Data in float64."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
import numpy as np

net = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 10))
shift = torch.from_numpy(np.linspace(0.0, 1.0, 256))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(4):
    x, y = torch.randn(32, 64), torch.randint(0, 10, (32,))
    hidden = net[1](net[0](x)) + shift  # fault: wide-part
    loss = F.cross_entropy(net[2](hidden.float()), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
# cure: np.linspace(0.0, 1.0, 256) => np.linspace(0.0, 1.0, 256, dtype=np.float32)
