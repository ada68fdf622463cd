"""Tensor parallelism (parallelize_module) on gloo, started by torchrun."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import Net, batch, log
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
torch.manual_seed(1)
model = Net()
parallelize_module(model, mesh, {"up": ColwiseParallel(), "mid": RowwiseParallel()})
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
torch.manual_seed(100)
for step in range(60):
    x, y = batch()
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if dist.get_rank() == 0:
        log(step, loss)
dist.destroy_process_group()
