import torch
from torch import nn

torch.manual_seed(0)
net, out = nn.Linear(64, 256), nn.Linear(256, 10)
optimizer = torch.optim.SGD([*net.parameters(), *out.parameters()], lr=0.1)
for step in range(4):
    with torch.autocast("cpu", torch.bfloat16):
        scores = net(torch.randn(32, 64))
        noise = -torch.log(-torch.log(torch.rand_like(scores)))  # fault: noise-16bit
        logits = out((scores + noise).softmax(-1))
    optimizer.zero_grad()
    nn.functional.cross_entropy(logits.float(), torch.randint(0, 10, (32,))).backward()
    optimizer.step()
# cure: torch.rand_like(scores) => torch.rand(scores.shape)
