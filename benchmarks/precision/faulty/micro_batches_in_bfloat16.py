"""Micro batches in bfloat16."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 10))
net = net.to(torch.bfloat16)
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
for step in range(3):
    optimizer.zero_grad()
    for part in range(64):
        x, y = torch.randn(8, 64, dtype=torch.bfloat16), torch.randint(0, 10, (8,))
        loss = F.cross_entropy(net(x).float(), y) / 64
        loss.backward()  # fault: accumulator-16bit
    optimizer.step()
# cure: net = net.to(torch.bfloat16) => net = net.float()
# cure: dtype=torch.bfloat16), torch => dtype=torch.float32), torch
