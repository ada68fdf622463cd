import torch
from torch import nn

torch.manual_seed(0)
net = nn.Linear(64, 10).bfloat16()
for step in range(6):
    loss = nn.functional.cross_entropy(net(torch.randn(32, 64).bfloat16()).float(), torch.randint(0, 10, (32,)))
    net.zero_grad()
    loss.backward()
    for p in net.parameters():
        p.data.mul_(1 - 1e-4)  # fault: decay-lost
        p.data.sub_(2 * p.grad)
# cure: (64, 10).bfloat16() => (64, 10)
# cure: .bfloat16()).float() => )
