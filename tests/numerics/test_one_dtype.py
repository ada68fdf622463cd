"""Convolutions and recurrent layers under a policy: numbers, dtypes, gradients, and everything back as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from autoprec import Policy
from autoprec.errors import UnsupportedError
from autoprec.numerics.one_dtype import ConvExecution, RecurrentExecution
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
    monkeypatch.setattr("autoprec.numerics.one_dtype.fast_bf16_gemm", lambda device: False)
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


@pytest.mark.parametrize("cls", [nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d])
@pytest.mark.parametrize("asked", [False, True])
def test_a_transposed_convolution_runs_and_has_the_size_that_is_asked_for(cls: Any, asked: bool) -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"up": cls(6, 4, 3, stride=2, padding=1, groups=2)})
    rank = model["up"].weight.ndim - 2
    x = torch.randn(2, 6, *(5,) * rank, requires_grad=True)
    given: dict[str, Any] = {"output_size": [10] * rank} if asked else {}
    expected = model["up"](x, **given)
    wanted = torch.autograd.grad(expected.square().sum(), [x, *model.parameters()])
    policy = Policy.model_validate({"recipes": {"bf16": BUILTIN_RECIPES["bf16"]}, "default": "bf16"})
    policy.apply(model)
    out = model["up"](x, **given)
    found = torch.autograd.grad(out.square().sum(), [x, *model.parameters()])
    assert (out.shape, out.dtype) == (expected.shape, torch.float32)
    assert 0 < (out - expected).norm() <= 8e-3 * expected.norm()
    for a, b in zip(found, wanted, strict=True):
        assert (a - b).norm() <= 2e-2 * b.norm()
    assert policy.audit(model).ok
    policy.remove(model)
    assert torch.equal(model["up"](x, **given), expected)


@pytest.mark.parametrize("norm", [nn.utils.parametrizations.weight_norm, nn.utils.parametrizations.spectral_norm])
def test_a_convolution_whose_weight_is_computed(norm: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(norm(nn.Conv1d(4, 8, 3))).eval()  # spectral norm iterates in training
    x = torch.randn(2, 4, 6)
    expected = model(x)
    policy = Policy.model_validate({"recipes": {"bf16": BUILTIN_RECIPES["bf16"]}, "default": "bf16"})
    policy.apply(model)
    out = model(x)
    assert 0 < (out - expected).norm() <= 8e-3 * expected.norm()
    out.sum().backward()
    assert all(p.grad is not None for p in model.parameters())


LIMITS = {"fp32": 1e-6, "bf16": 2e-2, "fp16": 3e-3}


def uniform(name: str) -> Policy:
    return Policy.model_validate({"recipes": {name: BUILTIN_RECIPES[name]}, "default": name})


@pytest.mark.parametrize("cls", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("name", LIMITS)
def test_recurrent_forward_backward_and_what_is_said(cls: type[nn.RNNBase], name: str) -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"rnn": cls(12, 16, num_layers=2, bidirectional=True, batch_first=True)})
    x = torch.randn(3, 5, 12, requires_grad=True)
    rnn = model["rnn"]
    expected, _ = rnn(x)
    wanted = torch.autograd.grad(expected.square().sum(), [x, *rnn.parameters()])
    policy = uniform(name)
    policy.apply(model)
    out, last = rnn(x)
    found = torch.autograd.grad(out.square().sum(), [x, *rnn.parameters()])
    assert {t.dtype for t in (out, *(last if isinstance(last, tuple) else (last,)), *found)} == {torch.float32}
    assert (out - expected).norm() <= LIMITS[name] * expected.norm()
    assert all((a - b).norm() <= 3 * LIMITS[name] * b.norm() for a, b in zip(found, wanted, strict=True))
    assert (name == "fp32") == torch.equal(out, expected)
    (row,) = policy.audit(model).layers
    assert (row.name, row.executed, row.ok) == ("rnn", dict.fromkeys(("fprop", "dgrad", "wgrad"), name), True)
    policy.remove(model)
    assert type(rnn) is cls
    assert torch.equal(rnn(x)[0], expected)


@pytest.mark.parametrize("cls", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
@pytest.mark.parametrize("name", LIMITS)
def test_a_recurrent_cell_called_step_by_step(cls: type[nn.RNNCellBase], name: str) -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"cell": cls(12, 16, bias=name != "bf16")})
    cell, x = model["cell"], torch.randn(5, 3, 12, requires_grad=True)

    def run() -> tuple[torch.Tensor, ...]:
        state = None
        for step in x:
            state = cell(step, state)
        out = state[0] if isinstance(state, tuple) else state
        return out, *torch.autograd.grad(out.square().sum(), [x, *cell.parameters()])

    expected = run()
    policy = uniform(name)
    policy.apply(model)
    found = run()
    assert {t.dtype for t in found} == {torch.float32}
    assert all((a - b).norm() <= 4 * LIMITS[name] * b.norm() for a, b in zip(found, expected, strict=True))
    (row,) = policy.audit(model).layers
    assert (row.name, row.executed, row.ok) == ("cell", dict.fromkeys(("fprop", "dgrad", "wgrad"), name), True)
    policy.remove(model)
    assert all(map(torch.equal, run(), expected))


def test_states_and_packed_sequences_keep_their_kind() -> None:
    model = nn.Sequential(nn.LSTM(4, 6))
    uniform("bf16").apply(model)
    packed = pack_sequence([torch.randn(5, 4), torch.randn(2, 4)])
    out, (h, c) = model[0](packed, (torch.zeros(1, 2, 6), torch.zeros(1, 2, 6)))
    assert isinstance(out, PackedSequence)
    assert {out.data.dtype, h.dtype, c.dtype} == {torch.float32}
    assert torch.equal(out.batch_sizes, packed.batch_sizes)
    states = [torch.zeros(1, 2, 6), torch.zeros(1, 2, 6)]  # as a loop that detaches them writes it
    assert torch.equal(model[0](packed, states)[0].data, out.data)


@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("fp32", torch.float32)])
def test_a_recurrent_output_is_autocasts_but_for_fp32(name: str, dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.GRU(4, 6))
    uniform(name).apply(model)
    with torch.autocast("cpu", torch.bfloat16):
        assert model[0](torch.randn(3, 2, 4))[0].dtype is dtype


def test_emulated_bf16_rounds_weights_and_inputs() -> None:
    module = nn.GRU(4, 6)
    run = RecurrentExecution(LayerPlan.uniform(BUILTIN_RECIPES["fp16"]), module, "fp16", backend="native")
    x = torch.randn(3, 2, 4)
    with torch.no_grad():
        out, _ = run.run(module.forward, (x,), {})
        for weight in module.parameters():
            weight.copy_(weight.half().float())
        assert torch.equal(out, module(x.half().float())[0].half().float())


def test_eight_bits_and_mixed_plans_are_refused() -> None:
    model = nn.Sequential(nn.LSTM(16, 16))
    with pytest.raises(UnsupportedError, match="no device runs a recurrent layer in fp8"):
        uniform("fp8_rowwise").apply(model)
    mixed = {"recipes": {n: BUILTIN_RECIPES[n] for n in ("bf16", "fp32")}}
    rule = {"match": "0", "recipe": "bf16", "gemms": {"wgrad": "fp32"}}
    with pytest.raises(UnsupportedError, match="one recipe in all three passes"):
        Policy.model_validate({**mixed, "layers": [rule]}).apply(model)
    assert type(model[0]) is nn.LSTM
