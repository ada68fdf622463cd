"""A fourier layer."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)


class Spectral(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(33))

    def forward(self, x):
        return torch.fft.irfft(torch.fft.rfft(x) * self.weight, 64)  # fault: wide-part


net = nn.Sequential(Spectral(), nn.Linear(64, 10))
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
for step in range(6):
    x, y = torch.randn(32, 64), torch.randint(0, 10, (32,))
    loss = F.cross_entropy(net(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
