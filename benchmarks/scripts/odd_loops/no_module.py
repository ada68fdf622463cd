"""Two matrices and no nn.Module at all."""

import torch

torch.manual_seed(14)
first = torch.nn.Parameter(torch.randn(16, 64) * 0.2)
second = torch.nn.Parameter(torch.randn(64, 16) * 0.2)
optimizer = torch.optim.Adam([first, second], lr=3e-3)
for step in range(30):
    x = torch.randn(32, 16)
    loss = ((x @ first).relu() @ second - x.flip(1)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item())
