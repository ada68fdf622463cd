"""Sinusoidal table built in bfloat16."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)


class Positions(nn.Module):
    def __init__(self, length=1024, width=64):
        super().__init__()
        position = torch.arange(length).to(torch.bfloat16)
        scale = torch.exp(torch.arange(0, width, 2) * (-9.2 / width)).to(torch.bfloat16)
        angle = position[:, None] * scale
        self.register_buffer("pe", torch.cat([angle.sin(), angle.cos()], -1).float())  # fault: positions-16bit

    def forward(self, x):
        return x + self.pe[: x.shape[1]]


net = nn.Sequential(nn.Embedding(64, 64), Positions(), nn.Linear(64, 64))
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
for step in range(4):
    ids = torch.randint(0, 64, (2, 600))
    logits = net(ids[:, :-1])
    loss = F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
# cure: torch.arange(length).to(torch.bfloat16) => torch.arange(length).float()
# cure: (-9.2 / width)).to(torch.bfloat16) => (-9.2 / width)).float()
