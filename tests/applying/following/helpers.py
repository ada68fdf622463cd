"""A small model whose layers can become sensitive, and a policy that records what following needs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from autoprec.applying.policy import Policy

FP8 = {"format": "fp8", "scaling": {"granularity": "tensor", "scale": "current"}}
DELAYED = {"format": "fp8", "scaling": {"granularity": "tensor", "scale": "delayed", "amax_history_len": 8}}


class Net(nn.Module):
    """Three layers, running statistics, dropout, a counter of its own.

    The second layer may see a massive row that the loss does not (a first token, in a language model): with one scale
    for the whole tensor the other rows vanish.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        # with the usual eps a unit that is rarely positive makes every error ten times as large, on some machines
        self.norm, self.drop = nn.BatchNorm1d(16, eps=0.1), nn.Dropout(0.1)
        self.head = nn.Linear(16, 4)
        self.outlier, self.calls = 0.0, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        for index, layer in enumerate(self.layers):
            if index == 1 and self.outlier:
                x = layer(torch.cat([x, torch.full((1, 16), self.outlier)]))[:-1]
            else:
                x = layer(x)
            x = torch.relu(x)
        return self.head(self.drop(self.norm(x)))


def followed(recipe: dict[str, Any] | None = None, error: float = 0.2, **changes: Any) -> Policy:
    """Return a policy that runs the three layers in FP8, each with the given gradient error in its table."""
    recipes = {"fp8": recipe or FP8}
    groups = [{"layers": [f"layers.{i}"], "times": [1.0, 0.5], "errors": [0.0, error]} for i in range(3)]
    document = {
        "recipes": recipes,
        "layers": [{"match": "layers.*", "recipe": "fp8"}],
        "follow": {
            "max_gradient_error": 0.6,
            "step_time_ms": 4.0,
            "recipes": recipes,
            "choices": ["keep", "fp8"],
            "groups": groups,
        },
    }
    return Policy.model_validate({**document, **changes})


class Training:
    """A run of the model: :meth:`step` returns the loss, which ``weight`` multiplies."""

    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.model = Net()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.total = torch.zeros(())
        self.weight = 1.0

    def step(self) -> float:
        x, y = torch.randn(32, 16), torch.randint(0, 4, (32,))
        loss = nn.functional.cross_entropy(self.model(x), y) * self.weight
        self.total += loss.detach()
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return float(loss.detach())
