"""A module that asks for float32."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)


class Net(nn.Module):
    _keep_in_fp32_modules_strict = ["wo"]

    def __init__(self):
        super().__init__()
        self.wi, self.wo = nn.Linear(64, 256), nn.Linear(256, 10)

    def forward(self, x):
        return self.wo(F.gelu(self.wi(x)).to(self.wo.weight.dtype))


net = Net().bfloat16()  # fault: kept-module-cast
optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
for step in range(4):
    x, y = torch.randn(32, 64, dtype=torch.bfloat16), torch.randint(0, 10, (32,))
    loss = F.cross_entropy(net(x).float(), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
# cure: net = Net().bfloat16() => net = Net().bfloat16()\nnet.wo.float()
