"""A quantised model and its policy, for the tests of the guard."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from autoprec import Policy
from autoprec.policy import Guard, policy_from_dict, resolve
from autoprec.precision.recipes import BUILTIN_RECIPES

LAYERS = ["0", "2", "4"]


def make_policy(recipe: str = "fp8_tensorwise", **section: Any) -> Policy:
    recipes = {recipe: BUILTIN_RECIPES[recipe].to_dict()}
    document = {"schema": "autoprec.policy/1", "recipes": recipes, "layers": [{"match": "*", "recipe": recipe}]}
    policy = policy_from_dict(document, cls=Policy)
    return policy.model_copy(update={"guard": Guard(**section)}) if section else policy


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 16))


def formats_of(policy: Any, gemm: str = "wgrad") -> list[str]:
    plans = resolve(policy, LAYERS, strict=False)
    return ["keep" if (r := plans[name].recipe(gemm)) is None else r.format for name in LAYERS]  # type: ignore[arg-type]
