"""The emulated backend runs every recipe at every size, and says that it is not hardware."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autoprec.backends import choose
from autoprec.backends.emulated import EmulatedBackend
from autoprec.policy import LayerPlan
from autoprec.precision.recipes import BUILTIN_RECIPES


@pytest.mark.parametrize("name", BUILTIN_RECIPES)
def test_odd_sizes_run_and_are_close_to_float32(name: str) -> None:
    backend, recipe, module = EmulatedBackend(), BUILTIN_RECIPES[name], nn.Linear(37, 19)
    found = backend.capability(recipe, gemm="fprop", m=5, k=37, n=19, device="cpu")
    assert found
    assert ("no 8-bit speed" in found.reason) == (recipe.format != "int8")
    plan = LayerPlan.uniform(recipe)
    run = backend.bind(plan, module, name="x", seed=3)
    x = torch.randn(5, 37, requires_grad=True)
    out = run(x, module.weight, module.bias)
    out.sum().backward()
    wanted = module(x).detach()
    assert (out - wanted).norm() <= 0.3 * wanted.norm()
    asked = zip(("fprop", "dgrad", "wgrad"), plan.recipes, strict=True)
    assert run.executed == {gemm: one.describe() for gemm, one in asked if one is not None}
    assert (run.backend, run.quantizers.seed) == ("emulated", 3)


def test_it_runs_anywhere() -> None:
    assert all(EmulatedBackend().available(device) for device in ("cpu", "cuda:0", "mps"))


def test_by_name_it_emulates_casts_and_as_the_choice_of_auto_it_does_not() -> None:
    plan, module = LayerPlan.uniform(BUILTIN_RECIPES["bf16"]), nn.Linear(2, 2)
    asked, chosen = (choose(name, "cpu").bind(plan, module, name="x", seed=0) for name in ("emulated", "auto"))
    assert (asked.emulates_casts, chosen.emulates_casts) == (True, False)
