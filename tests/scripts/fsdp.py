"""FSDP2 (fully_shard) on gloo, started by torchrun."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import Net, batch, log
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
torch.manual_seed(1)
model = Net()
fully_shard(model.mid, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
torch.manual_seed(100 + dist.get_rank())
for step in range(60):
    x, y = batch()
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    if dist.get_rank() == 0:
        log(step, loss)
dist.destroy_process_group()
