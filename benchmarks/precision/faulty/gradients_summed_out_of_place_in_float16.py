"""Gradients summed out of place in float16."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 10))
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
for step in range(3):
    x, y = torch.randn(32, 64), torch.randint(0, 10, (32,))
    total = [torch.zeros_like(p).bfloat16() for p in net.parameters()]
    for part in range(64):
        loss = F.cross_entropy(net(x), y)
        grads = torch.autograd.grad(loss, list(net.parameters()))
        total = [a + g.bfloat16() for a, g in zip(total, grads)]  # fault: accumulator-16bit
    for p, a in zip(net.parameters(), total):
        p.grad = a.float() / 64
    optimizer.step()
# cure: torch.zeros_like(p).bfloat16() => torch.zeros_like(p)
# cure: a + g.bfloat16() => a + g
