"""A model called on a dict of its weights, which the loop replaces; with --transform by torch.func.grad."""

import sys

import torch
import torch.nn.functional as F
from common import Net, batch, log

torch.manual_seed(1)
model = Net()
weights = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}


def objective(weights, x, y):
    return F.cross_entropy(torch.func.functional_call(model, weights, (x,)), y)


for step in range(10_000_000 if "--transform" in sys.argv else 60):
    x, y = batch()
    if "--transform" in sys.argv:
        found, loss = torch.func.grad_and_value(objective)(weights, x, y)
    else:
        loss = objective(weights, x, y)
        found = dict(zip(weights, torch.autograd.grad(loss, list(weights.values())), strict=True))
    weights = {name: (w - 0.1 * found[name]).detach().requires_grad_() for name, w in weights.items()}
    log(step, loss.detach())
