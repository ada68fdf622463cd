"""Sinusoids of timesteps in float16."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.time, self.body = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x, t):
        half = torch.arange(32, device=x.device) / 32
        angle = t.half()[:, None] * torch.exp(-9.2 * half).half()  # fault: positions-16bit
        wave = torch.cat([angle.sin(), angle.cos()], -1).float()
        return self.body(x + self.time(wave))


net = Denoiser()
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
times = torch.arange(3000, 4000)
for step in range(4):
    x = torch.randn(1000, 64)
    loss = F.mse_loss(net(x, times), x)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
# cure: t.half()[:, None] => t.float()[:, None]
# cure: half).half() => half)
