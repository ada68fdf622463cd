"""The optimizer trains copies of the weights in more bits, which are copied back after each step."""

import torch
import torch.nn.functional as F
from common import Net, batch, log

torch.manual_seed(1)
model = Net()
copies = [p.detach().double().requires_grad_() for p in model.parameters()]
optimizer = torch.optim.AdamW(copies, lr=1e-3)
for step in range(60):
    x, y = batch()
    loss = F.cross_entropy(model(x), y)
    model.zero_grad()
    loss.backward()
    for copy, p in zip(copies, model.parameters(), strict=True):
        copy.grad = p.grad.double()
    optimizer.step()
    with torch.no_grad():
        for copy, p in zip(copies, model.parameters(), strict=True):
            p.copy_(copy)
    log(step, loss)
