"""Input no recipe was made for, through whole models, on every backend that runs here.

Layer by layer the shipped conformance suite does the same (``tests/backends/test_backends.py``).
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from autoprec import Policy
from autoprec.errors import PolicyError, UnsupportedError
from autoprec.policy import policy_from_dict
from autoprec.precision.recipes import BUILTIN_RECIPES

BACKENDS = {
    "emulated": ("bf16", "fp8_tensorwise", "fp8_delayed", "fp8_block", "mxfp8", "nvfp4", "int8"),
    "native": ("bf16", "fp8_tensorwise", "fp8_delayed", "fp8_rowwise", "int8"),
    "torchao": ("fp8_tensorwise", "fp8_rowwise", "mxfp8"),
}
CASES = [(backend, name) for backend, names in BACKENDS.items() for name in names]


def uniform(name: str) -> Policy:
    return Policy.model_validate({"recipes": {name: BUILTIN_RECIPES[name]}, "default": name})


def applied(backend: str, name: str) -> tuple[nn.Module, Policy]:
    if backend == "torchao":
        pytest.importorskip("torchao", reason="torchao is not installed: pip install --no-deps torchao")
    torch.manual_seed(0)
    model, policy = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 32)), uniform(name)
    policy.apply(model, backend=backend)
    return model, policy


def gradients(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters()])


@pytest.mark.parametrize(("backend", "name"), CASES)
def test_batches_of_any_size_and_layout(backend: str, name: str) -> None:
    model, policy = applied(backend, name)
    for x in (
        torch.randn(16, 64),
        torch.randn(7, 64),  # a ragged last batch
        torch.randn(2, 3, 64),
        torch.randn(64, 5).t(),
        torch.randn(8, 128)[:, ::2],
        torch.randn(1, 64).expand(6, 64),
    ):
        model.zero_grad()
        out = model(x)
        assert out.shape == (*x.shape[:-1], 32)
        out.square().mean().backward()
        assert gradients(model).isfinite().all()
        assert gradients(model).any()
    assert policy.audit(model).ok
    empty = model(torch.zeros(0, 64))
    empty.sum().backward()
    assert empty.shape == (0, 32)


@pytest.mark.parametrize(("backend", "name"), CASES)
def test_zeros_stay_zeros_and_what_is_not_finite_shows(backend: str, name: str) -> None:
    model, _ = applied(backend, name)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    out = model(torch.zeros(8, 64))
    assert not out.any()
    out.sum().backward()
    assert gradients(model).isfinite().all()
    for value in (math.nan, math.inf):
        model, _ = applied(backend, name)
        x = torch.randn(8, 64)
        x[3, 5] = value
        loss = model(x).square().mean()
        assert not loss.isfinite()


def test_pure_e5m2_is_refused_with_the_gemm_and_the_way_out() -> None:
    document = {
        "schema": "autoprec.policy/1",
        "recipes": {"f": {"format": "fp8", "operands": {"input": "e5m2", "weight": "e5m2", "grad_output": "e4m3"}}},
        "default": "f",
    }
    with pytest.raises(PolicyError, match=r"fprop would multiply e5m2 by e5m2.*make input or weight e4m3"):
        policy_from_dict(document)


@pytest.fixture
def ampere(monkeypatch: pytest.MonkeyPatch) -> None:
    """An A100, as far as capability queries can tell."""
    monkeypatch.setattr("autoprec.applying.stage._device_of", lambda model: "cuda:0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))


@pytest.mark.parametrize("name", ["fp8_tensorwise", "fp8_rowwise", "fp8_block", "mxfp8", "nvfp4"])
def test_a_gpu_without_the_format_is_refused_before_anything_changes(ampere: None, name: str) -> None:
    model = nn.Sequential(nn.Linear(128, 128))
    with pytest.raises(
        UnsupportedError, match=r"layer '0'.*compute capability (8\.9|9\.0|10\.0), this device has 8\.0"
    ):
        uniform(name).apply(model, backend="native")
    assert type(model[0]) is nn.Linear


def test_auto_emulates_what_the_gpu_lacks_and_says_so(ampere: None) -> None:
    model, policy = nn.Sequential(nn.Linear(128, 128)), uniform("fp8_rowwise")
    policy.apply(model)
    model(torch.randn(4, 128)).sum().backward()
    row = policy.audit(model).layers[0]
    assert row.backend == "emulated"
    assert "emulated because native cannot run fprop" in row.reason


def test_sizes_the_kernels_cannot_take_are_named(ampere: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    with pytest.raises(UnsupportedError, match="N = 50257 is not a multiple of 16"):
        uniform("fp8_tensorwise").apply(nn.Sequential(nn.Linear(128, 50257)), backend="native")
