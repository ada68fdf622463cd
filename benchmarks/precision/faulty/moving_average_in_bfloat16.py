import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 10))
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
average = [p.detach().to(torch.bfloat16) for p in net.parameters()]
for step in range(6):
    x, y = torch.randn(32, 64), torch.randint(0, 10, (32,))
    loss = F.cross_entropy(net(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    for a, p in zip(average, net.parameters()):
        a.mul_(0.999).add_(p.detach().to(torch.bfloat16), alpha=0.001)  # fault: ema-16bit
# cure: average = [p.detach().to(torch.bfloat16) for => average = [p.detach().clone() for
# cure: p.detach().to(torch.bfloat16), alpha => p.detach(), alpha
