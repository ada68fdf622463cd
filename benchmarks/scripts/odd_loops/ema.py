"""An exponential moving average of the weights, evaluated between training steps."""

import copy

import torch
from torch import nn

torch.manual_seed(3)
model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 4))
average = copy.deepcopy(model).requires_grad_(False)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

for step in range(30):
    x = torch.randn(64, 16)
    y = x[:, :4].argmax(1)
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        for slow, fast in zip(average.parameters(), model.parameters(), strict=True):
            slow.lerp_(fast, 0.1)
        accuracy = (average(x).argmax(1) == y).float().mean()
    print(step, loss.item(), accuracy.item())
