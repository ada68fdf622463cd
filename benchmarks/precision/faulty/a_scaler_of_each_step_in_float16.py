"""A scaler of each step in float16."""

import torch
from torch import nn

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 10))
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
scale = 2.0**24
for step in range(6):
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    with torch.autocast("cpu", torch.float16):
        loss = net(torch.randn(32, 64)).float().square().mean()
    optimizer.zero_grad()
    scaler.scale(loss).backward()  # fault: scaler-fixed
    scaler.step(optimizer)
    scaler.update()
# cure:     scaler.update() =>     scaler.update()\n    scale = scaler.get_scale()
