"""Switch router in bfloat16."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)


class Mixture(nn.Module):
    def __init__(self, width=64, experts=16, top=2):
        super().__init__()
        self.top = top
        self.gate = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(experts))

    def forward(self, x):
        scores = self.gate(x).softmax(-1)  # fault: router-16bit
        chosen = scores.argmax(-1, keepdim=True)  # fault: router-16bit
        weight = scores.gather(-1, chosen)
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            rows, slot = (chosen == index).nonzero(as_tuple=True)
            out = out.index_add(0, rows, (weight[rows, slot, None] * expert(x[rows])).to(out.dtype))
        return out


net = nn.Sequential(nn.Linear(64, 64), Mixture(), nn.Linear(64, 10))
net = net.bfloat16()
optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
for step in range(4):
    x, y = torch.randn(512, 64, dtype=torch.bfloat16), torch.randint(0, 10, (512,))
    loss = F.cross_entropy(net(x).float(), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
# cure: self.gate(x).softmax(-1) => F.linear(x.float(), self.gate.weight.float()).softmax(-1)
