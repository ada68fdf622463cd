"""Weights that no layer module owns: raw parameters, experts, subclasses with a forward of their own."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autoprec.applying.policy import Policy, remove_policy, tunable_layers
from autoprec.precision.recipes import BUILTIN_RECIPES


class Experts(nn.Module):
    """Grouped and indexed expert weights, a raw matrix, and two tables that no GEMM reads."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.randn(4, 32, 16) * 0.2)
        self.down = nn.Parameter(torch.randn(4, 16, 16) * 0.2)
        self.mix = nn.Parameter(torch.randn(16, 16) * 0.2)
        self.pos_embedding = nn.Parameter(torch.randn(10, 16))
        self.lookup = nn.Parameter(torch.randn(10, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.pos_embedding[: x.shape[1]] + self.lookup[: x.shape[1]]
        gate, up = torch.stack([F.linear(x[i], self.gate_up[i]) for i in range(4)]).chunk(2, -1)
        return torch.bmm(F.silu(gate) * up, self.down) @ self.mix


class Doubled(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(input)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts, self.doubled = Experts(), Doubled(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.doubled(self.experts(x)).square().mean()


def step(model: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    model.zero_grad()
    loss = model(x)
    loss.backward()
    return loss.detach(), torch.cat([p.grad.flatten() for p in model.parameters()])


@pytest.fixture
def model() -> Model:
    torch.manual_seed(0)
    return Model()


@pytest.mark.parametrize("name", ["bf16", "fp8_rowwise", "mxfp8"])
@pytest.mark.parametrize("activations", ["keep", "bf16"])
def test_they_run_are_audited_and_come_off(model: Model, name: str, activations: str) -> None:
    x = torch.randn(4, 8, 16)
    before = step(model, x)
    recipe = BUILTIN_RECIPES[name]
    policy = Policy.model_validate({"recipes": {name: recipe}, "default": name, "activations": activations})
    policy.apply(model)
    _, gradient = step(model, x)
    assert 0 < (gradient - before[1]).norm() / before[1].norm() < 0.2
    report = policy.audit(model)
    assert report.ok, report.to_json()
    assert [row.name for row in report.layers] == ["experts.gate_up", "experts.down", "experts.mix", "doubled"]
    assert all(set(row.executed.values()) == {recipe.describe()} for row in report.layers)
    remove_policy(model)
    after = step(model, x)
    assert torch.equal(before[1], after[1])


def test_tables_are_not_taken_for_weights_unless_a_rule_says_so(model: Model) -> None:
    assert list(tunable_layers(model)) == [
        *(f"experts.{n}" for n in ("gate_up", "down", "mix", "lookup")),
        "doubled",
    ]
    policy = Policy.model_validate(
        {"recipes": {"b": BUILTIN_RECIPES["bf16"]}, "layers": [{"match": "experts.*", "recipe": "b"}]}
    )
    policy.apply(model)
    step(model, torch.randn(4, 8, 16))
    report = policy.audit(model)
    assert not report.ok
    assert [(row.name, row.reason) for row in report.mismatches] == [
        ("experts.lookup", "no F.linear, matmul or einsum by this weight was seen")
    ]


def test_a_forward_stored_on_the_instance_is_kept(model: Model) -> None:
    calls = []
    original = model.doubled.forward

    def hooked(input: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return original(input)

    model.doubled.forward = hooked
    policy = Policy.model_validate({"recipes": {"b": BUILTIN_RECIPES["bf16"]}, "default": "b"})
    policy.apply(model)
    step(model, torch.randn(4, 8, 16))
    assert calls == [1]
    assert policy.audit(model).ok
    remove_policy(model)
    assert model.doubled.forward is hooked


class Equations(nn.Module):
    """Weights multiplied by einsum: heads, experts with the weight first, and a product that is none."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.Parameter(torch.randn(16, 8, 8) * 0.2)
        self.out = nn.Parameter(torch.randn(8, 8, 16) * 0.2)
        self.experts = nn.Parameter(torch.randn(4, 16, 16) * 0.2)
        self.decay = nn.Parameter(torch.ones(8, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.einsum("bthd,hdc->btc", torch.einsum("btc,chd->bthd", x, self.heads), self.out)
        x = torch.einsum("edc,ebc->ebd", self.experts, x)
        return (x * torch.einsum("btc,tc->btc", x, self.decay)).square().mean()


@pytest.mark.parametrize("name", ["bf16", "fp8_rowwise"])
def test_einsum_runs_under_the_policy(name: str) -> None:
    torch.manual_seed(0)
    model, x = Equations(), torch.randn(4, 8, 16)
    before = step(model, x)
    policy = Policy.model_validate({"recipes": {name: BUILTIN_RECIPES[name]}, "default": name})
    policy.apply(model)
    _, gradient = step(model, x)
    assert 0 < (gradient - before[1]).norm() / before[1].norm() < 0.2
    report = policy.audit(model)
    assert report.ok, report.to_json()
    assert [row.name for row in report.layers] == ["heads", "out", "experts"]
    remove_policy(model)
    assert torch.equal(step(model, x)[1], before[1])


class Cast(nn.Linear):
    """As nanochat's linear layer: the weight is cast to what the input is in."""

    def __init__(self, how) -> None:
        super().__init__(32, 16, bias=False)
        self.how = how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.how(self.weight, x))


@pytest.mark.parametrize("name", ["bf16", "fp8_rowwise"])
@pytest.mark.parametrize(
    "how",
    [
        lambda w, x: w.to(x.dtype),
        lambda w, x: w.type_as(x),
        lambda w, x: w.bfloat16(),
        lambda w, x: w.bfloat16().contiguous(),
        lambda w, x: w.t().to(x.dtype).t(),
    ],
)
def test_a_weight_that_the_script_casts_is_still_that_weight(how, name: str) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(Cast(how)), torch.randn(8, 32).bfloat16()
    expected = model(x)
    policy = Policy.model_validate({"recipes": {"r": BUILTIN_RECIPES[name]}, "default": "r"})
    policy.apply(model)
    out = model(x)
    out.float().square().sum().backward()
    report = policy.audit(model)
    assert report.ok, str(report)
    assert set(report.layers[0].executed) >= {"fprop", "wgrad"}
    assert model[0].weight.grad is not None
    limit = 1e-2 if name == "bf16" else 8e-2
    assert 0 <= (out - expected).float().norm() <= limit * expected.float().norm()
    remove_policy(model)
    assert torch.equal(model(x), expected)
