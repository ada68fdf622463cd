import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
w = nn.Linear(64, 10).bfloat16()  # fault: updates-lost


class Plain(torch.optim.Optimizer):
    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(p.grad, alpha=-group["lr"])


optimizer = Plain(w.parameters(), 1e-3)
for step in range(6):
    x, y = torch.randn(32, 64), torch.randint(0, 10, (32,))
    loss = F.cross_entropy(w(x.bfloat16()).float(), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
# cure: nn.Linear(64, 10).bfloat16() => nn.Linear(64, 10)
# cure: x.bfloat16() => x
