"""A thread makes batches and puts them into a queue; a lock and a progress bar live beside the loop."""

import queue
import threading

import torch
from torch import nn

batches: "queue.Queue[torch.Tensor]" = queue.Queue(maxsize=4)
lock = threading.Lock()
done = threading.Event()


def produce() -> None:
    generator = torch.Generator().manual_seed(13)
    while not done.is_set():
        batch = torch.randn(32, 16, generator=generator)
        while not done.is_set():
            try:
                batches.put(batch, timeout=0.1)
                break
            except queue.Full:
                continue


thread = threading.Thread(target=produce, daemon=True)
thread.start()
torch.manual_seed(13)
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16))
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
for step in range(30):
    x = batches.get(timeout=60)
    loss = (model(x) - x.flip(1)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    with lock:
        optimizer.step()
    print("\r", step, loss.item(), end="", flush=True)
done.set()
thread.join()
