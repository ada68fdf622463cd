"""autocast(fp16), a GradScaler, gradient checkpointing and a convolution."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

torch.manual_seed(16)
features = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(4))
head = nn.Sequential(nn.Flatten(), nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 10))
model = nn.Sequential(features, head)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
scaler = torch.amp.GradScaler("cpu")
for step in range(30):
    x = torch.randn(16, 3, 12, 12)
    y = x.mean((1, 2, 3)).mul(40).long().clamp(-4, 5) + 4
    with torch.autocast("cpu", torch.bfloat16):
        loss = nn.functional.cross_entropy(checkpoint(head, features(x), use_reentrant=False).float(), y)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    print(step, loss.item())
