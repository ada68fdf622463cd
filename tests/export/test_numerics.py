"""Exported code that runs on this machine computes what the policy computes."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from autoprec.applying.policy import Policy, apply_policy
from autoprec.export import export
from autoprec.policy import OperatorPolicy, policy_from_dict
from autoprec.precision.recipes import BUILTIN_RECIPES
from autoprec.support.optional import is_available
from tests.export.readers import load_source


def _policy(name: str, **rule: Any) -> Policy:
    recipes = {key: BUILTIN_RECIPES[key].to_dict() for key in (name, "bf16")}
    rules = [{"match": "0", "recipe": name, **rule}]
    return policy_from_dict({"schema": "autoprec.policy/1", "recipes": recipes, "layers": rules}, cls=Policy)


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(160, 192), nn.Tanh(), nn.Linear(192, 16))


def _gradients(model: nn.Module, steps: int = 3) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    for step in range(steps):
        model.zero_grad()
        model(torch.randn(64, 160, generator=generator) * (1 + step)).pow(2).mean().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def _distance(a: list[torch.Tensor], b: list[torch.Tensor]) -> float:
    return max(((x - y).norm() / y.norm()).item() for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("rule", [{}, {"gemms": {"wgrad": "bf16"}}], ids=["uniform", "wgrad in bf16"])
@pytest.mark.parametrize("name", ["bf16", "fp8_tensorwise", "fp8_rowwise", "fp8_delayed", "fp8_block"])
def test_the_plain_module_agrees_with_apply(name: str, rule: dict[str, Any]) -> None:
    policy = _policy(name, **rule)
    source = export(policy, "python").files["precision_policy.py"]
    module = load_source(source, "precision_policy")
    ours, theirs, plain = _model(), _model(), _model()
    apply_policy(policy, ours, backend="emulated")
    module.apply(theirs)
    reference = _gradients(plain)
    gap, effect = _distance(_gradients(theirs), _gradients(ours)), _distance(_gradients(ours), reference)
    # the two differ by where products are rounded to bf16; both lie far nearer to each other than to float32
    assert gap <= max(0.35 * effect, 1e-6)


def test_the_plain_module_can_be_taken_off_again() -> None:
    policy = _policy("fp8_rowwise").model_copy(update={"activations": "bf16"})
    module = load_source(export(policy, "python").files["precision_policy.py"], "precision_policy")
    model, plain = _model(), _model()
    keys = list(model.state_dict())
    module.apply(model)
    assert list(model.state_dict()) == keys
    assert isinstance(model[0], nn.Linear)
    assert model(torch.ones(2, 160)).dtype is torch.float32  # operators.output
    assert "forward" in model.__dict__
    module.remove(model)
    assert type(model[0]) is nn.Linear
    assert all(torch.equal(a, b) for a, b in zip(_gradients(model), _gradients(plain), strict=True))


def test_a_copy_of_a_model_under_the_plain_module_trains_by_itself() -> None:
    module = load_source(export(_policy("fp8_delayed"), "python").files["precision_policy.py"], "precision_policy")
    model = module.apply(_model())
    other = copy.deepcopy(model)
    assert all(torch.equal(a, b) for a, b in zip(_gradients(model), _gradients(other), strict=True))


@pytest.mark.skipif(not is_available("torchao"), reason="torchao is not installed")
@pytest.mark.parametrize("name", ["fp8_tensorwise", "fp8_rowwise"])
def test_torchao_trains_under_the_export_and_agrees_with_apply(name: str) -> None:
    policy = _policy(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = load_source(export(policy, "torchao").files["precision_torchao.py"], "precision_torchao")
        theirs = module.apply(_model().to(torch.bfloat16), emulate=True)
        ours = _model().to(torch.bfloat16)
        apply_policy(policy, ours, backend="emulated")
        x = torch.randn(64, 160, dtype=torch.bfloat16)
        exact = _model()(x.float())
        error = (ours(x).float() - exact).norm() / exact.norm()
        gap = (theirs(x) - ours(x)).float().norm() / exact.norm()
        theirs(x).sum().backward()
    assert gap < 0.3 * error
    assert theirs[0].weight.grad is not None


class _Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(16, 16)
        self.seen: list[torch.dtype] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self.proj(x)
        out = torch.nn.functional.scaled_dot_product_attention(q, q, q)
        self.seen = [q.dtype, out.dtype, torch.softmax(out, -1).dtype]
        return out


@pytest.mark.parametrize("target", ["python", "torchao"])
@pytest.mark.parametrize("attention", ["keep", "fp32"])
def test_attention_runs_in_its_own_dtype(target: str, attention: str) -> None:
    if target == "torchao" and not is_available("torchao"):
        pytest.skip("torchao is not installed")
    document = {
        "schema": "autoprec.policy/1",
        "recipes": {"bf16": {"format": "bf16"}},
        "default": "bf16",
        "activations": "bf16",
        "operators": {"attention": attention},
    }
    done = export(policy_from_dict(document, cls=Policy), target)
    assert done.lossy == []
    name = next(iter(done.files)).removesuffix(".py")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = load_source(done.files[f"{name}.py"], name)
    model = module.apply(_Attending())
    x = torch.randn(1, 2, 8, 16)
    if target == "python":
        out = model(x)
        assert out.dtype is torch.float32  # operators.output
        assert model.seen[2] is torch.float32
    else:
        with module.autocast("cpu"):
            out = model(x)
    assert model.seen[0] is torch.bfloat16
    assert model.seen[1] is (torch.float32 if attention == "fp32" else torch.bfloat16)


@pytest.mark.skipif(not is_available("torchao.float8"), reason="torchao is not installed")
@pytest.mark.parametrize("wide", [True, False])
def test_the_exported_torchao_module_returns_what_the_policy_says_of_the_output(wide: bool) -> None:
    operators = OperatorPolicy(output="fp32" if wide else "keep")
    policy = _policy("bf16").model_copy(update={"activations": "bf16", "operators": operators})
    module = load_source(export(policy, "torchao").files["precision_torchao.py"], "precision_torchao")
    model = module.apply(_model())
    with module.autocast("cpu"):
        out = model(torch.randn(4, 160))
    assert out.dtype is (torch.float32 if wide else torch.bfloat16)
