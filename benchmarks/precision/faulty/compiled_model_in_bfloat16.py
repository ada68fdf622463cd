"""Compiled model in bfloat16."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 10)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


net = Net().to(torch.bfloat16)  # fault: updates-lost
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-5)
compiled = torch.compile(net, backend="aot_eager")
for step in range(6):
    x, y = torch.randn(32, 64, dtype=torch.bfloat16), torch.randint(0, 10, (32,))
    loss = F.cross_entropy(compiled(x).float(), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
# cure: Net().to(torch.bfloat16) => Net()
# cure: dtype=torch.bfloat16 => dtype=torch.float32
