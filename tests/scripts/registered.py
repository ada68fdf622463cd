"""Names its model with autoprec.register and steps through Session.step."""

import torch
import torch.nn.functional as F
from common import Net, batch, log

import autoprec.trial.session as autoprec

torch.manual_seed(1)
model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
session = autoprec.Session(autoprec.register(model, optimizer), optimizer)
for step in range(60):
    x, y = batch()
    loss = F.cross_entropy(model(x), y)
    log(step, loss)
    session.step(loss)
