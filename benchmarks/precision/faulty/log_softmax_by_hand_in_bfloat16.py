"""Log softmax by hand in bfloat16."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 4000))
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
for step in range(4):
    x, y = torch.randn(64, 64), torch.randint(0, 10, (64,))
    logits = net(x).bfloat16()  # fault: loss-16bit
    shifted = logits - logits.amax(-1, keepdim=True)
    log_probs = shifted - shifted.exp().sum(-1, keepdim=True).log()  # fault: loss-16bit softmax-16bit
    loss = -log_probs.gather(-1, y[:, None]).mean()  # fault: loss-16bit
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
# cure: net(x).bfloat16() => net(x)
