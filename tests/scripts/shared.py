"""A model in shared memory, as Hogwild trains one: whoever is forked from here trains the same weights."""

import torch
import torch.nn.functional as F
from common import Net, batch, log

torch.manual_seed(1)
model = Net()
model.share_memory()
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
x, y = batch()
for step in range(60):
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    log(step, loss)
