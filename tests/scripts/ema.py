"""An exponential moving average of the model, evaluated now and then; it must be left alone."""

import copy

import torch
import torch.nn.functional as F
from common import Net, batch, log

torch.manual_seed(1)
ema = Net()
model = Net()
ema.load_state_dict(copy.deepcopy(model.state_dict()))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(60):
    x, y = batch()
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        for average, p in zip(ema.parameters(), model.parameters()):  # noqa: B905
            average.lerp_(p, 0.1)
        ema(x)
    log(step, loss)
