"""A module without data, called on weights of its own that an optimizer trains."""

import torch
import torch.nn.functional as F
from common import Net, batch, log

torch.manual_seed(1)
with torch.device("meta"):
    model = Net()
weights = {name: (0.2 * torch.randn(p.shape)).requires_grad_() for name, p in model.named_parameters()}
optimizer = torch.optim.AdamW(weights.values(), lr=1e-3)
for step in range(60):
    x, y = batch()
    loss = F.cross_entropy(torch.func.functional_call(model, weights, (x,)), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    log(step, loss.detach())
