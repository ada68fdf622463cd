"""DataLoader with two worker processes, shuffling, and an IterableDataset behind --iterable."""

import sys

import torch
import torch.nn.functional as F
from common import Net, log
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

torch.manual_seed(1)
model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)


class Stream(IterableDataset):
    def __iter__(self):
        for i in range(640):
            generator = torch.Generator().manual_seed(i)
            yield torch.randn(16, generator=generator), i % 10


if "--iterable" in sys.argv:
    loader = DataLoader(Stream(), batch_size=8)
else:
    data = TensorDataset(torch.randn(640, 16), torch.randint(0, 10, (640,)))
    loader = DataLoader(data, batch_size=8, shuffle=True, num_workers=2, persistent_workers=True, prefetch_factor=2)
for step, (x, y) in enumerate(loader):
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    log(step, loss)
