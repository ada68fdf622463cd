"""Gradients summed in bfloat16."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 10))
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
for step in range(3):
    x, y = torch.randn(32, 64), torch.randint(0, 10, (32,))
    total = [torch.zeros_like(p, dtype=torch.bfloat16) for p in net.parameters()]
    for part in range(32):
        loss = F.cross_entropy(net(x), y)
        for a, g in zip(total, torch.autograd.grad(loss, list(net.parameters()))):
            a.add_(g.to(torch.bfloat16))  # fault: accumulator-16bit
    for p, a in zip(net.parameters(), total):
        p.grad = a.float() / 32
    optimizer.step()
# cure: dtype=torch.bfloat16) for => dtype=torch.float32) for
# cure: g.to(torch.bfloat16) => g
