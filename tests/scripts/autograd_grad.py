"""Gradients as values: torch.autograd.grad by the parameters, and an update by hand."""

import torch
import torch.nn.functional as F
from common import Net, batch, log

torch.manual_seed(1)
model = Net()
weights = list(model.parameters())
for step in range(60):
    x, y = batch()
    loss = F.cross_entropy(model(x), y)
    gradients = torch.autograd.grad(loss, weights)
    with torch.no_grad():
        for weight, gradient in zip(weights, gradients, strict=True):
            weight -= 0.1 * gradient
    log(step, loss)
