"""Gradients reduced in bfloat16."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
import os

import torch.distributed as dist


def compress(group, bucket):
    small = bucket.buffer().to(torch.bfloat16)
    work = dist.all_reduce(small, async_op=True)  # fault: gradients-reduced-16bit
    return work.get_future().then(lambda done: bucket.buffer().copy_(done.value()[0]))


os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1"}
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
net = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 10)))
net.register_comm_hook(None, compress)  # fault: gradients-reduced-16bit
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
for step in range(6):
    x, y = torch.randn(32, 64), torch.randint(0, 10, (32,))
    loss = F.cross_entropy(net(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
# cure: net.register_comm_hook(None, compress) => net.train()
