"""Trains plain tensors, for hours if nobody stops it: no module owns them, so no layer can be decided about."""

import torch

torch.manual_seed(1)
weight = torch.randn(16, 10, requires_grad=True)
optimizer = torch.optim.SGD([weight], lr=0.1)
while True:
    optimizer.zero_grad()
    (torch.randn(8, 16) @ weight).square().mean().backward()
    optimizer.step()
