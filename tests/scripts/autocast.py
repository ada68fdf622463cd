"""bf16 autocast written into the script."""

import torch
import torch.nn.functional as F
from common import Net, batch, log

torch.manual_seed(1)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for step in range(60):
    x, y = batch()
    with torch.autocast("cpu", torch.bfloat16):
        loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    log(step, loss)
