"""Weights that no layer module owns: raw parameters, experts, subclasses with a forward of their own."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autoprec import Policy
from autoprec.applying import raw_weights
from autoprec.applying.policy import remove_policy
from autoprec.applying.units import tunable_units
from autoprec.precision.recipes import BUILTIN_RECIPES


class Experts(nn.Module):
    """Grouped and indexed expert weights, a raw matrix, and two tables that no GEMM reads."""

    def __init__(self, count: int = 4) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.randn(count, 32, 16) * 0.2)
        self.down = nn.Parameter(torch.randn(count, 16, 16) * 0.2)
        self.mix = nn.Parameter(torch.randn(16, 16) * 0.2)
        self.pos_embedding = nn.Parameter(torch.randn(10, 16))
        self.lookup = nn.Parameter(torch.randn(10, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.pos_embedding[: x.shape[1]] + self.lookup[: x.shape[1]]
        gate, up = torch.stack([F.linear(x[i], self.gate_up[i]) for i in range(len(x))]).chunk(2, -1)
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
    assert list(tunable_units(model)) == [
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


class Grouped(nn.Module):
    """Experts in 3-D weights, one stored as [experts, out, in] and one as [experts, in, out], and grouped products."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(4, 32, 16) * 0.2), nn.Parameter(torch.randn(4, 32, 16) * 0.2)
        self.dtype = dtype

    def forward(self, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        up = self.up.to(self.dtype).transpose(-2, -1)
        hidden = F.relu(torch._grouped_mm(x.to(self.dtype), up, offs=ends))
        return F.grouped_mm(hidden, self.down.to(self.dtype), offs=ends)


class Listed(nn.Module):
    """The same as a loop over linear layers."""

    def __init__(self, like: Grouped) -> None:
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(16, 32, bias=False) for _ in range(4))
        self.down = nn.ModuleList(nn.Linear(32, 16, bias=False) for _ in range(4))
        with torch.no_grad():
            for i in range(4):
                self.up[i].weight.copy_(like.up[i])  # type: ignore[union-attr, operator]
                self.down[i].weight.copy_(like.down[i].t())  # type: ignore[union-attr, operator]

    def forward(self, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        stops = [0, *ends.tolist()]
        parts = [x[a:b] for a, b in itertools.pairwise(stops)]
        return torch.cat([d(F.relu(u(p))) for p, u, d in zip(parts, self.up, self.down, strict=True)])


ENDS = torch.tensor([7, 7, 20, 33], dtype=torch.int32)


@pytest.mark.parametrize("name", ["fp8_rowwise", "fp8_tensorwise", "mxfp8", "fp8_block"])
def test_grouped_experts_are_each_a_layer_of_its_own(name: str) -> None:
    torch.manual_seed(0)
    grouped = Grouped(torch.float32)
    listed, x = Listed(grouped), torch.randn(33, 16)
    policy = Policy.model_validate({"recipes": {name: BUILTIN_RECIPES[name]}, "default": name})
    gradients = []
    for model in (grouped, listed):
        policy.apply(model)
        (model(x, ENDS) ** 2).sum().backward()
        report = policy.audit(model)
        assert report.ok, report.to_json()
        gradients.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    assert set(gradients[0]) == {"up", "down"}
    for i in range(4):
        for part, turn in (("up", False), ("down", True)):
            theirs = gradients[1].get(f"{part}.{i}.weight", torch.zeros(()))  # no tokens, no gradient
            mine = gradients[0][part][i]
            assert torch.equal(mine.t() if turn else mine, theirs.expand_as(mine.t() if turn else mine))


def test_rows_of_no_expert_are_zero_and_learn_nothing() -> None:
    model, x = Grouped(torch.float32), torch.randn(40, 16)
    x[33:] = torch.nan
    policy = Policy.model_validate({"recipes": {"r": BUILTIN_RECIPES["fp8_tensorwise"]}, "default": "r"})
    policy.apply(model)
    out = model(x.requires_grad_(), ENDS)
    out.sum().backward()
    assert out[33:].count_nonzero() == 0
    assert model.up.grad is not None
    assert model.up.grad.isfinite().all()
    assert x.grad is not None
    assert x.grad[33:].count_nonzero() == 0


def test_a_grouped_product_is_not_cast_by_autocast() -> None:
    model = Grouped(torch.float32)
    Policy.model_validate({"recipes": {"r": BUILTIN_RECIPES["fp8_rowwise"]}, "default": "r"}).apply(model)
    with torch.autocast("cpu", torch.bfloat16):
        assert model(torch.randn(33, 16), ENDS).dtype is torch.float32


class Unbound(Experts):
    """Raw weights by views of every kind."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate = torch.stack([F.linear(x[i], w) for i, w in enumerate(self.gate_up.bfloat16().unbind(0))])
        half, _ = torch.bmm(gate, self.gate_up.bfloat16()), self.lookup
        return half.float() @ self.mix.transpose(0, 1) @ self.mix.permute(1, 0) @ self.mix.view(16, 16)


@pytest.mark.filterwarnings("ignore")  # the own deprecations of Dynamo
@pytest.mark.parametrize("kind", [Experts, Unbound])
def test_views_and_copies_of_weights_are_followed_in_one_compiled_graph(kind: type[Experts]) -> None:
    torch.manual_seed(0)
    model, x = kind(2), torch.randn(2, 8, 16).to(torch.bfloat16 if kind is Unbound else torch.float32)
    names = ["gate_up", "down", "mix"] if kind is Experts else ["gate_up", "mix"]
    rules = [{"match": name, "recipe": "r"} for name in names]
    policy = Policy.model_validate({"recipes": {"r": BUILTIN_RECIPES["fp8_rowwise"]}, "layers": rules})
    policy.apply(model)
    eager = [g.clone() for g in _gradients(model, model, x)]
    policy.apply(model)
    torch._dynamo.reset()
    compiled = _gradients(model, torch.compile(model, backend="eager", fullgraph=True), x)
    for ours, theirs in zip(compiled, eager, strict=True):
        assert (ours - theirs).norm() <= 0.02 * theirs.norm()
    report = policy.audit(model)
    assert report.ok, report.to_json()
    assert all(set(row.executed) == {"fprop", "dgrad", "wgrad"} for row in report.layers if row.name in names)
    torch._dynamo.reset()


def _broken(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    copy = weight.bfloat16()
    torch._dynamo.graph_break()
    return (x.bfloat16() @ copy.t()).float()


@pytest.mark.filterwarnings("ignore")  # the own deprecations of Dynamo
@pytest.mark.parametrize(
    ("multiply", "name"),
    [  # casts of FP8 are a second of tracing each
        (lambda x, w: x @ w.T, "fp8_rowwise"),
        (lambda x, w: x @ w.mT, "bf16"),
        (lambda x, w: (x.bfloat16() @ w.bfloat16().T).float(), "bf16"),
        (lambda x, w: x @ w.flatten().view(16, 16), "bf16"),
        (lambda x, w: torch.mm(x, torch.t(w)), "bf16"),
        (lambda x, w: x @ w.chunk(1)[0], "bf16"),
        (_broken, "fp8_rowwise"),
    ],
    ids=["T", "mT", "a copy's T", "flat", "torch.t", "chunk", "a break"],
)
def test_no_view_of_a_weight_passes_a_compiled_graph_by(multiply: object, name: str) -> None:
    class Raw(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix = nn.Parameter(torch.randn(16, 16))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return multiply(x, self.mix)  # type: ignore[operator, no-any-return]

    model, x = Raw(), torch.randn(8, 16, requires_grad=True)
    rules = [{"match": "mix", "recipe": "r"}]
    policy = Policy.model_validate({"recipes": {"r": BUILTIN_RECIPES[name]}, "layers": rules})
    policy.apply(model)
    torch._dynamo.reset()
    run = torch.compile(model, backend="eager")
    for _ in range(2):
        run(x).sum().backward()
    (row,) = policy.audit(model).layers
    assert row.ok, row
    assert row.executed.keys() == {"fprop", "dgrad", "wgrad"}
    assert not raw_weights._TRACED
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore")  # the own deprecations of Dynamo
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(
    "use",
    [
        lambda h: h.unflatten(-1, (2, 8)).transpose(1, 2).flatten(2),
        lambda h: torch.cat(h.chunk(2, -1), -1),
        lambda h: h.transpose(1, 2).contiguous().transpose(1, 2),
        lambda h: h.reshape(2, -1, 16),
        lambda h: torch.stack(h.unbind(0)),
    ],
    ids=["unflatten", "chunk", "transpose", "reshape", "unbind"],
)
def test_activations_as_large_as_a_weight_stay_in_one_graph(use: object, dynamic: bool) -> None:
    """All bf16, with a table of positions, cut a compiled GPT into 14 graphs, until torch gave up on them."""

    class Placed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.place, self.out = nn.Parameter(torch.randn(8, 16)), nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.out(use(x + self.place).reshape(x.shape))  # type: ignore[operator, no-any-return]

    model, x = Placed(), torch.randn(2, 8, 16)
    policy = Policy.model_validate({"recipes": {"r": BUILTIN_RECIPES["bf16"]}, "default": "r"})
    policy.apply(model)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True, dynamic=dynamic)
    eager = _gradients(model, model, x)
    for ours, theirs in zip(_gradients(model, compiled, x), eager, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-2, atol=1e-2)
    torch._dynamo.reset()


def _gradients(model: nn.Module, run: object, x: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    (run(x).float() ** 2).sum().backward()  # type: ignore[operator]
    return [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.filterwarnings("ignore")  # the own deprecations of Dynamo
def test_a_compiled_script_does_not_pass_grouped_products_by() -> None:
    torch.manual_seed(0)
    model, x = Grouped(), torch.randn(33, 16)
    policy = Policy.model_validate({"recipes": {"r": BUILTIN_RECIPES["fp8_rowwise"]}, "default": "r"})
    policy.apply(model)
    torch._dynamo.reset()
    torch.compile(model, backend="eager")(x.requires_grad_(), ENDS).float().square().sum().backward()
    report = policy.audit(model)
    assert [row.name for row in report.layers] == ["up", "down"]
    assert all(set(row.executed) == {"fprop", "dgrad", "wgrad"} for row in report.layers)
    torch._dynamo.reset()
