"""torch.multiprocessing.spawn: the training runs in children that the script starts itself.

``spawned.py PORT`` meets at a fixed port; with ``nan`` behind it the loss of the second rank alone is lost at step 4.
"""

import os
import socket
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from common import Net, batch, log
from torch.nn.parallel import DistributedDataParallel


def work(rank, world, port):
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=world)
    torch.manual_seed(1)
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(60):
        x, y = batch()
        loss = F.cross_entropy(model(x), y)
        if step == 4 and rank == 1 and "nan" in sys.argv:
            loss = loss * float("nan")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0:
            log(step, loss)
    dist.destroy_process_group()


if __name__ == "__main__":
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(work, args=(2, int(sys.argv[1]) if sys.argv[1:] else port), nprocs=2)
