"""LBFGS: several forward and backward passes inside each optimizer step."""

import torch
from torch import nn

torch.manual_seed(2)
model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
x = torch.randn(128, 8)
y = torch.sin(x.sum(1, keepdim=True))
optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=5)


def closure() -> torch.Tensor:
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    return loss


for step in range(15):
    print(step, float(optimizer.step(closure)))
