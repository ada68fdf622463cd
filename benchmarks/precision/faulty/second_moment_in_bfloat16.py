"""Second moment in bfloat16."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 10))
net = net.bfloat16()  # fault: moment-16bit
optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)  # fault: moment-16bit
for step in range(6):
    x, y = torch.randn(32, 64), torch.randint(0, 10, (32,))
    loss = F.cross_entropy(net(x.bfloat16()).float(), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
# cure: net = net.bfloat16() => net = net.float()
# cure: net(x.bfloat16()).float() => net(x)
