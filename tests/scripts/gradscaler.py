"""fp16 autocast with a GradScaler whose first scale overflows: some steps are skipped."""

import torch
import torch.nn.functional as F
from common import Net, batch, log

torch.manual_seed(1)
model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**22)
for step in range(60):
    x, y = batch()
    with torch.autocast("cpu", torch.float16):
        loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    log(step, loss)
