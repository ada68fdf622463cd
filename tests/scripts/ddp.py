"""DistributedDataParallel on gloo, started by torchrun."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import Net, batch, log
from torch.nn.parallel import DistributedDataParallel

import autoprec

dist.init_process_group("gloo")
torch.manual_seed(1)
model = DistributedDataParallel(Net())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
torch.manual_seed(100 + dist.get_rank())
for step in range(60):
    x, y = batch()
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if dist.get_rank() == 0:
        log(step, loss)
        if step % 4 == 3:
            autoprec.report(kept=loss)
dist.destroy_process_group()
