"""Convolutions under a policy."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autoprec.numerics.conv import ConvExecution
from autoprec.policy import LayerPlan
from autoprec.precision.recipes import BUILTIN_RECIPES


@pytest.mark.parametrize("cls", [nn.Conv1d, nn.Conv2d, nn.Conv3d])
@pytest.mark.parametrize("name", ["fp32", "bf16", "fp16"])
def test_forward_backward_and_what_is_said(cls: type[nn.Module], name: str) -> None:
    torch.manual_seed(0)
    module = cls(3, 5, 3, padding=1, padding_mode="circular")
    rank = module.weight.ndim - 2
    x = torch.randn(2, 3, *(6,) * rank, requires_grad=True)
    expected = module(x)
    expected.sum().backward()
    wanted = module.weight.grad.clone()
    module.zero_grad()
    layer = ConvExecution(LayerPlan.uniform(BUILTIN_RECIPES[name]), module, name)
    out = layer(x, module.weight, module.bias)
    out.sum().backward()
    assert out.dtype is torch.float32
    limit = {"fp32": 1e-6, "bf16": 8e-3, "fp16": 1e-3}[name]
    assert (out - expected).norm() <= limit * expected.norm()
    assert (module.weight.grad - wanted).norm() <= limit * wanted.norm()
    assert layer.executed == dict.fromkeys(("fprop", "dgrad", "wgrad"), name)


def test_under_autocast_the_output_is_autocasts() -> None:
    module = nn.Conv2d(3, 4, 3)
    x = torch.randn(1, 3, 8, 8)
    with torch.autocast("cpu", torch.bfloat16):
        for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.bfloat16), ("fp32", torch.float32)):
            layer = ConvExecution(LayerPlan.uniform(BUILTIN_RECIPES[name]), module, name)
            assert layer(x, module.weight, module.bias).dtype is dtype
