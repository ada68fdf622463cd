"""Four micro-batches per optimizer step."""

import torch
import torch.nn.functional as F
from common import Net, batch, log

torch.manual_seed(1)
model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(60):
    total = 0.0
    for _ in range(4):
        x, y = batch()
        loss = F.cross_entropy(model(x), y) / 4
        loss.backward()
        total += loss.item()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    log(step, total)
