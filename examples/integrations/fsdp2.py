"""FSDP2 under a policy: torchrun --nproc-per-node 2 fsdp2.py policy.yaml."""

import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from toy import batches, make_model

import autoprec

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
model = make_model()

policy = autoprec.load(sys.argv[1])
policy.apply(model)

for layer in model:
    if isinstance(layer, torch.nn.Linear):
        fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = policy.wrap_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))

for x, y in batches(60, seed=dist.get_rank()):
    loss = torch.nn.functional.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

if dist.get_rank() == 0:
    print(f"loss {loss.item():.4f}; executed as asked: {policy.audit(model).ok}")
dist.destroy_process_group()
