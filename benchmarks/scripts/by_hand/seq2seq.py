"""torch's encoder-decoder transformer, which learns to reverse a sequence of bytes."""

import torch
from task import Task
from torch import nn
from torch.nn import functional as F

WIDTH, HEADS, DEPTH, BATCH, LENGTH = 256, 4, 2, 16, 48


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(64, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.core = nn.Transformer(WIDTH, HEADS, DEPTH, DEPTH, 4 * WIDTH, dropout=0.0, batch_first=True)
        self.head = nn.Linear(WIDTH, 64)

    def forward(self, source, target):
        embedded = [self.tokens(x) + self.positions.weight[: x.shape[1]] for x in (source, target)]
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        return self.head(self.core(*embedded, tgt_mask=mask, tgt_is_causal=True))


def make():
    """Return what is trained, and on what."""
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)

    def batch():
        source = torch.randint(1, 64, (BATCH, LENGTH))
        return source, F.pad(source.flip(1), (1, 0))

    def loss_of(model, batch):
        return F.cross_entropy(model(batch[0], batch[1][:, :-1]).flatten(0, 1), batch[1][:, 1:].flatten())

    return Task(model, optimizer, batch, loss_of, clip=1.0)
