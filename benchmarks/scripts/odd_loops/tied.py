"""A language model whose embedding and output share one weight, cast where it is used."""

import torch
from torch import nn
from torch.nn import functional as F


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(96, 32)
        self.mix = nn.Linear(32, 32)
        self.head = nn.Linear(32, 96, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        hidden = hidden + F.gelu(F.linear(hidden, self.mix.weight.to(hidden.dtype), self.mix.bias))
        return self.head(hidden)


torch.manual_seed(10)
model = Tied()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step in range(30):
    tokens = torch.randint(0, 96, (8, 17)).cumsum(1) % 96
    logits = model(tokens[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item())
