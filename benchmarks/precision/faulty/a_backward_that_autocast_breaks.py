"""A backward that autocast breaks."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.t() @ x  # fault: function-backward


class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(256, 64) / 8)

    def forward(self, x):
        return Product.apply(x, self.weight)


net = nn.Sequential(Own(), nn.GELU(), nn.Linear(256, 10))
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
for step in range(4):
    x, y = torch.randn(32, 64), torch.randint(0, 10, (32,))
    with torch.autocast("cpu", torch.bfloat16):
        loss = F.cross_entropy(net(x).float(), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
# cure: def forward(ctx, x, weight): => @torch.amp.custom_fwd(device_type='cpu')\n    def forward(ctx, x, weight):
# cure: def backward(ctx, grad): => @torch.amp.custom_bwd(device_type='cpu')\n    def backward(ctx, grad):
