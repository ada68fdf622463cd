"""LBFGS: forward and backward run several times inside optimizer.step(closure)."""

import torch
import torch.nn.functional as F
from common import Net, batch, log

torch.manual_seed(1)
model = Net()
optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)
for step in range(60):
    x, y = batch()

    def closure():
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)  # noqa: B023
        loss.backward()
        return loss

    loss = optimizer.step(closure)
    log(step, loss)
