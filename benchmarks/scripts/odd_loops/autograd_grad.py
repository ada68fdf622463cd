"""torch.autograd.grad and an update by hand: no backward(), no optimizer."""

import torch
from torch import nn

torch.manual_seed(5)
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16))
parameters = list(model.parameters())

for step in range(30):
    x = torch.randn(32, 16)
    loss = (model(x) - x.flip(1)).square().mean()
    gradients = torch.autograd.grad(loss, parameters)
    with torch.no_grad():
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter -= 0.1 * gradient
    print(step, loss.item())
