"""DDP under a policy: torchrun --nproc-per-node 2 ddp.py policy.yaml."""

import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from toy import batches, make_model

import autoprec

dist.init_process_group("gloo")
model = DistributedDataParallel(make_model())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

policy = autoprec.load(sys.argv[1])
policy.apply(model)  # before or after wrapping
optimizer = policy.wrap_optimizer(optimizer)
guard = autoprec.Guard(policy, model)  # all ranks fall back at the same step

for x, y in batches(60, seed=dist.get_rank()):
    loss = torch.nn.functional.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    guard.step(loss)

if dist.get_rank() == 0:
    print(f"loss {loss.item():.4f}; executed as asked: {guard.policy.audit(model).ok}")
dist.destroy_process_group()
