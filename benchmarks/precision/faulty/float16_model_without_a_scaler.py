"""Float16 model without a scaler."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 10))
net = net.half()  # fault: fp16-unscaled
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(4):
    x, y = torch.randn(32, 64), torch.randint(0, 10, (32,))
    loss = F.cross_entropy(net(x.half()).float(), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
# cure: net = net.half() => net = net.float()
# cure: x.half() => x
