"""torch.func: gradients of a pure function over a dictionary of parameters, no optimizer object."""

import torch
from torch import nn
from torch.func import functional_call, grad_and_value

torch.manual_seed(4)
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16))
parameters = {name: value.detach().clone() for name, value in model.named_parameters()}


def loss_of(weights: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    return (functional_call(model, weights, (x,)) - x.flip(1)).square().mean()


for step in range(30):
    gradients, loss = grad_and_value(loss_of)(parameters, torch.randn(32, 16))
    parameters = {name: value - 0.1 * gradients[name] for name, value in parameters.items()}
    print(step, loss.item())
