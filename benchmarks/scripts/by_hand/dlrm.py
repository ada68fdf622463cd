"""A recommendation model: embedding bags, an MLP over dense features, their products, and an MLP over those."""

from itertools import pairwise

import torch
from task import Task
from torch import nn
from torch.nn import functional as F

DENSE, BAGS, ROWS, WIDTH, BATCH = 32, 12, 5000, 128, 512


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(ROWS, WIDTH, mode="sum") for _ in range(BAGS))
        self.bottom = nn.Sequential(nn.Linear(DENSE, 512), nn.ReLU(), nn.Linear(512, WIDTH), nn.ReLU())
        pairs = BAGS * (BAGS + 1) // 2
        sizes = [WIDTH + pairs, 1024, 1024, 512]
        layers = [m for a, b in pairwise(sizes) for m in (nn.Linear(a, b), nn.ReLU())]
        self.top = nn.Sequential(*layers, nn.Linear(sizes[-1], 1))
        self.register_buffer("pairs", torch.triu_indices(BAGS + 1, BAGS + 1, 1), persistent=False)

    def forward(self, dense, sparse):
        bottom = self.bottom(dense)
        found = torch.stack([bottom, *(bag(rows) for bag, rows in zip(self.bags, sparse, strict=True))], dim=1)
        products = torch.bmm(found, found.transpose(1, 2))[:, self.pairs[0], self.pairs[1]]
        return self.top(torch.cat([bottom, products.to(bottom.dtype)], dim=1)).squeeze(-1)


def make():
    """Return what is trained, and on what."""
    model = Net()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.01)
    weights = torch.randn(DENSE, generator=torch.Generator().manual_seed(1234))

    def batch():
        dense = torch.randn(BATCH, DENSE)
        sparse = torch.randint(0, ROWS, (BAGS, BATCH, 4))
        clicked = dense @ weights / 4 + (sparse[0, :, 0] % 7 - 3) / 3 + 0.5 * torch.randn(BATCH) > 0
        return dense, sparse, clicked.float()

    def loss_of(model, batch):
        return F.binary_cross_entropy_with_logits(model(batch[0], batch[1]).float(), batch[2])

    return Task(model, optimizer, batch, loss_of)
