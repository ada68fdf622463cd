"""A frozen last layer, a zero-initialised residual branch, and a head whose output is unused."""

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 64)
        self.branch = nn.Linear(64, 64)
        self.unused = nn.Linear(64, 8)
        self.tail = nn.Linear(64, 4)
        nn.init.zeros_(self.branch.weight)
        self.tail.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = torch.relu(self.first(x))
        hidden = hidden + self.branch(hidden)
        return self.tail(hidden), self.unused(hidden)


torch.manual_seed(9)
model = Net()
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
for step in range(30):
    x = torch.randn(64, 16)
    logits, _ = model(x)
    loss = nn.functional.cross_entropy(logits, x[:, :4].argmax(1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item())
