"""Convolutions under a policy."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
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


@pytest.mark.parametrize("autocast", [False, True])
def test_without_bf16_units_values_are_bf16_and_arithmetic_is_float32(
    autocast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("autoprec.numerics.conv.fast_bf16_gemm", lambda device: False)
    torch.manual_seed(0)
    module, x = nn.Conv2d(3, 4, 3), torch.randn(2, 3, 8, 8, requires_grad=True)
    seen: list[torch.dtype] = []
    original = module._conv_forward
    monkeypatch.setattr(module, "_conv_forward", lambda *args: seen.append(args[0].dtype) or original(*args))
    layer = ConvExecution(LayerPlan.uniform(BUILTIN_RECIPES["bf16"]), module, "bf16", emulates_casts=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out = layer(x, module.weight, module.bias)
    out.sum().backward()
    assert seen == [torch.float32]
    assert out.dtype is (torch.bfloat16 if autocast else torch.float32)
    wanted = F.conv2d(x.bfloat16(), module.weight.bfloat16(), module.bias.bfloat16())
    assert (out - wanted).float().norm() <= 4e-3 * wanted.float().norm()
    assert torch.equal(module.weight.grad, module.weight.grad.bfloat16().float())
    assert layer.executed == dict.fromkeys(("fprop", "dgrad", "wgrad"), "bf16")
