"""The optimizer steps before unscaling."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 10))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
for step in range(4):
    x, y = torch.randn(32, 64), torch.randint(0, 10, (32,))
    with torch.autocast("cpu", torch.float16):
        logits = net(x)
    loss = F.cross_entropy(logits.float(), y)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    optimizer.step()  # fault: step-before-unscale
# cure: optimizer.step() => scaler.step(optimizer)\n    scaler.update()
