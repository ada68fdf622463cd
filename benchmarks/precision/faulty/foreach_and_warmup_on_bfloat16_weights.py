"""Foreach and warmup on bfloat16 weights."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 10))
dtype = torch.bfloat16
net = net.to(dtype=dtype)  # fault: updates-lost
optimizer = torch.optim.AdamW(net.parameters(), lr=2e-5, foreach=True, eps=1e-8)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 100))
for step in range(8):
    x, y = torch.randn(32, 64), torch.randint(0, 10, (32,))
    loss = F.cross_entropy(net(x.to(dtype)).float(), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()
# cure: dtype = torch.bfloat16 => dtype = torch.float32
