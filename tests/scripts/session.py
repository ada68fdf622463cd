"""A loop that hooks cannot see: functional calls, torch.autograd.grad, updates by hand; a Session tells instead."""

import torch
import torch.nn.functional as F
from common import Net, batch, log

import autoprec.trial.session as autoprec

torch.manual_seed(1)
model = Net()
session = autoprec.Session(model)
for step in range(60):
    x, y = batch()
    loss = F.cross_entropy(model.forward(x), y)
    grads = torch.autograd.grad(loss, list(model.parameters()))
    with torch.no_grad():
        for p, g in zip(model.parameters(), grads):  # noqa: B905
            p.grad = g
            p.sub_(g, alpha=0.1)
    log(step, loss)
    session.observe(loss)
