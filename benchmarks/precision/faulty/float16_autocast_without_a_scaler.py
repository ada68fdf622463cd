"""Float16 autocast without a scaler."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 10))
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
for step in range(4):
    x, y = torch.randn(32, 64), torch.randint(0, 10, (32,))
    with torch.autocast("cpu", torch.float16):  # fault: fp16-unscaled
        logits = net(x)
    loss = F.cross_entropy(logits.float(), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
# cure: loss.backward() => scaler.scale(loss).backward()
# cure: optimizer.step() => scaler.step(optimizer)
# cure: for step in range(4): => scaler = torch.amp.GradScaler('cpu')\nfor step in range(4):
