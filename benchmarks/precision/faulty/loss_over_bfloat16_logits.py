"""Loss over bfloat16 logits."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 16000))
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
for step in range(4):
    x, y = torch.randn(32, 64), torch.randint(0, 10, (32,))
    logits = net(x).to(torch.bfloat16)  # fault: loss-16bit
    loss = F.cross_entropy(logits, y)  # fault: loss-16bit
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
# cure: net(x).to(torch.bfloat16) => net(x)
