"""A small model, a policy for its first layer, and how far apart two runs of it are."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from autoprec import Policy
from autoprec.policy import policy_from_dict
from autoprec.precision.recipes import BUILTIN_RECIPES

__all__ = ["distance", "gradients", "one_rule", "toy_model"]


def one_rule(name: str, **rule: Any) -> Policy:
    recipes = {key: BUILTIN_RECIPES[key].to_dict() for key in (name, "bf16")}
    rules = [{"match": "0", "recipe": name, **rule}]
    return policy_from_dict({"schema": "autoprec.policy/1", "recipes": recipes, "layers": rules}, cls=Policy)


def toy_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(160, 192), nn.Tanh(), nn.Linear(192, 16))


def gradients(model: nn.Module, steps: int = 3) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    for step in range(steps):
        model.zero_grad()
        model(torch.randn(64, 160, generator=generator) * (1 + step)).pow(2).mean().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def distance(a: list[torch.Tensor], b: list[torch.Tensor]) -> float:
    return max(((x - y).norm() / y.norm()).item() for x, y in zip(a, b, strict=True))
