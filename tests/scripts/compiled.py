"""torch.compile, with an evaluation that compiles before training starts."""

import torch
import torch.nn.functional as F
from common import Net, batch, log

torch.manual_seed(1)
model = torch.compile(Net(), backend="aot_eager")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
model.eval()
with torch.no_grad():
    model(batch()[0])
model.train()
for step in range(60):
    x, y = batch()
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    log(step, loss)
