"""Applying a policy in place: what it changes, what it must not change, and taking it off again."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autoprec import Policy
from autoprec.applying.policy import apply_policy, load, remove_policy
from autoprec.applying.units import tunable_units, unwrap
from autoprec.errors import PolicyMismatchError, UnknownNameError, UnsupportedError, UsageError
from autoprec.policy import policy_from_dict
from autoprec.precision.recipes import BUILTIN_RECIPES

ALL = sorted(BUILTIN_RECIPES)


def uniform(name: str, **more: object) -> Policy:
    return Policy.model_validate({"recipes": {name: BUILTIN_RECIPES[name]}, "default": name, **more})


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.proj, self.up, self.down = (
            nn.Linear(width, width),
            nn.Linear(width, 2 * width),
            nn.Linear(2 * width, width),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, width: int = 32, vocabulary: int = 48) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(2)])
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight
        nn.init.normal_(self.embedding.weight, std=0.2)

    def forward(self, ids: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        return logits if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def step(model: nn.Module, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    model.zero_grad()
    loss = model(ids, ids)
    loss.backward()
    return loss.detach(), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.fixture
def model() -> Model:
    torch.manual_seed(0)
    return Model()


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(0, 48, (4, 32), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("activations", ["keep", "bf16"])
def test_every_recipe_trains_is_audited_and_comes_off_bit_identically(
    model: Model, ids: torch.Tensor, name: str, activations: str
) -> None:
    before, gradient = step(model, ids)
    policy = uniform(name, activations=activations)
    policy.apply(model)
    loss, changed = step(model, ids)
    error = ((changed - gradient).norm() / gradient.norm()).item()
    assert loss.isfinite()
    assert error < 0.6
    assert error > 0 or (name == "fp32" and activations == "keep")
    report = policy.audit(model)
    assert report.ok, report.to_json()
    assert all(row.executed == row.requested for row in report.layers)
    policy.remove(model)
    after, restored = step(model, ids)
    assert torch.equal(before, after)
    assert torch.equal(gradient, restored)
    assert type(model) is Model
    assert type(model.head) is nn.Linear


def test_the_better_recipe_has_the_smaller_gradient_error(model: Model, ids: torch.Tensor) -> None:
    _, reference = step(model, ids)
    errors = []
    for name in ("tf32", "bf16", "fp8_rowwise", "nvfp4_plain"):
        uniform(name).apply(model)
        _, found = step(model, ids)
        errors.append(((found - reference).norm() / reference.norm()).item())
    assert errors == sorted(errors)
    assert errors[-1] > 5 * errors[1]


def test_a_policy_leaves_what_muon_multiplies_as_it_is(model: Model, ids: torch.Tensor) -> None:
    plain = copy.deepcopy(model)
    uniform("fp8_rowwise", activations="bf16").apply(model)
    optimizers = [torch.optim.Muon([p for p in one.parameters() if p.dim() == 2], lr=0.02) for one in (model, plain)]
    for _ in range(2):
        step(model, ids)
        for own, other in zip(model.parameters(), plain.parameters(), strict=True):
            other.grad = None if own.grad is None else own.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


def test_fp32_sums_of_a_heads_weight_gradient_matter_where_a_batch_agrees() -> None:
    """Rows of a gradient that all samples push the same way: what is rounded last is most of bf16's error."""
    torch.manual_seed(0)
    head = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 256, bias=False))
    nn.init.constant_(head[0].bias, 2.0)
    x, labels = torch.randn(4096, 64), torch.multinomial(torch.softmax(torch.linspace(0, 8, 256), 0), 4096, True)

    def gradient(wgrad: str) -> torch.Tensor:
        used = {name: BUILTIN_RECIPES[name].to_dict() for name in {"fp32", "bf16", wgrad}}
        rule = {"match": "1", "recipe": "fp32" if wgrad == "fp32" else "bf16", "gemms": {"wgrad": wgrad}}
        document = {"schema": "autoprec.policy/1", "recipes": used, "layers": [rule]}
        apply_policy(policy_from_dict(document), head)
        head.zero_grad()
        F.cross_entropy(head(x).float(), labels).backward()
        remove_policy(head)
        return head[1].weight.grad.clone()

    exact = gradient("fp32")
    rounded, wide = ((gradient(name) - exact).norm() / exact.norm() for name in ("bf16", "bf16_fp32_output"))
    assert 0.001 < rounded < 0.01
    assert wide < 0.8 * rounded


def test_an_empty_policy_leaves_no_trace(model: Model, ids: torch.Tensor) -> None:
    before = step(model, ids)
    Policy().apply(model)
    assert type(model) is Model
    assert all(
        type(m).__module__ != "autoprec.applying.swap" and "_autoprec" not in m.__dict__ for m in model.modules()
    )
    after = step(model, ids)
    assert torch.equal(before[0], after[0])
    assert torch.equal(before[1], after[1])


def test_identity_is_kept(model: Model) -> None:
    names = dict(model.named_parameters())
    keys = list(model.state_dict())
    calls = []
    model.blocks[0].up.register_forward_hook(lambda *_: calls.append(1))
    uniform("fp8_rowwise", activations="bf16").apply(model)
    assert list(model.state_dict()) == keys
    assert all(model.get_parameter(key) is value for key, value in names.items())
    assert model.head.weight is model.embedding.weight
    assert isinstance(model.blocks[0].up, nn.Linear)
    assert isinstance(model, Model)
    model(torch.zeros(1, 4, dtype=torch.long))
    assert calls == [1]
    assert "fp8 row" in repr(model)


def test_a_second_policy_replaces_the_first(model: Model, ids: torch.Tensor) -> None:
    uniform("bf16").apply(model)
    once = step(model, ids)
    uniform("nvfp4", activations="bf16").apply(model)
    uniform("bf16").apply(model)
    again = step(model, ids)
    assert torch.equal(once[0], again[0])
    assert torch.equal(once[1], again[1])
    remove_policy(model)
    assert type(model) is Model


@pytest.mark.parametrize("name", ["nvfp4", "fp8_delayed"])
def test_the_global_random_stream_is_not_touched(model: Model, ids: torch.Tensor, name: str) -> None:
    uniform(name).apply(model)
    torch.manual_seed(3)
    state = torch.get_rng_state()
    step(model, ids)
    assert torch.equal(state, torch.get_rng_state())


def test_plans_per_gemm(model: Model, ids: torch.Tensor) -> None:
    policy = Policy.model_validate(
        {
            "recipes": {"f": BUILTIN_RECIPES["fp8_rowwise"], "b": BUILTIN_RECIPES["bf16"]},
            "layers": [{"match": "blocks.*.up", "recipe": "f", "gemms": {"wgrad": "b", "dgrad": "keep"}}],
        }
    )
    policy.apply(model)
    step(model, ids)
    report = policy.audit(model)
    assert report.ok
    rows = {row.name: row.executed for row in report.layers}
    fp8 = BUILTIN_RECIPES["fp8_rowwise"].describe()
    assert rows["blocks.0.up"] == {"fprop": fp8, "dgrad": "keep", "wgrad": "bf16"}
    assert rows["blocks.0.down"] == dict.fromkeys(("fprop", "dgrad", "wgrad"), "keep")


def test_rules_and_backends_that_do_not_fit_are_refused_before_anything_changes(model: Model) -> None:
    policy = Policy.model_validate(
        {"recipes": {"b": BUILTIN_RECIPES["bf16"]}, "layers": [{"match": "block.*", "recipe": "b"}]}
    )
    with pytest.raises(PolicyMismatchError):
        policy.apply(model)
    apply_policy(policy, model, strict=False)
    with pytest.raises(UnknownNameError, match="did you mean 'emulated'"):
        uniform("bf16").apply(model, backend="emulate")
    with pytest.raises(UnsupportedError, match=r"blocks\.0\.qkv"):
        uniform("mxfp8").apply(model, backend="native")
    assert type(model) is Model


@pytest.mark.parametrize("name", ["fp8_rowwise", "fp8_delayed", "nvfp4"])
def test_a_copy_keeps_the_policy_and_a_pickle_does_not(model: Model, ids: torch.Tensor, name: str) -> None:
    policy = uniform(name, activations="bf16")
    policy.apply(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    step(model, ids)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.div_(2)
    loss, _ = step(copy.deepcopy(model), ids)  # has delayed scales and random streams that stand alike
    assert torch.equal(step(model, ids)[0], loss)
    loss, _ = step(copy.deepcopy(model), ids)
    twin = copy.deepcopy(model)
    assert torch.equal(step(model, ids)[0], step(twin, ids)[0])
    assert policy.audit(twin).ok
    with pytest.warns(UserWarning, match="pickled without its policy"):
        loaded = pickle.loads(pickle.dumps(model))
    assert type(loaded) is Model
    assert type(loaded.head) is nn.Linear
    assert not policy.audit(loaded).ok


def test_wrappers_do_not_show_in_names(model: Model) -> None:
    compiled = torch.compile(model, backend="eager")
    assert unwrap(compiled) is model
    assert list(tunable_units(compiled)) == list(tunable_units(model))
    assert list(tunable_units(model))[:4] == ["blocks.0.qkv", "blocks.0.proj", "blocks.0.up", "blocks.0.down"]


def test_round_trip_through_a_file(tmp_path, model: Model, ids: torch.Tensor) -> None:
    policy = uniform("fp8_delayed", activations="bf16")
    path = policy.save(tmp_path / "policy.yaml")
    again = load(path)
    assert again == policy
    again.apply(model)
    step(model, ids)
    assert again.audit(model).ok


@pytest.mark.filterwarnings("ignore:.torch.jit:FutureWarning")  # PyTorch 2.14
@pytest.mark.parametrize("make", [torch.jit.script, lambda m: torch.jit.trace(m, torch.ones(1, 8))])
def test_a_torchscript_model_is_refused_and_its_layers_are_not_tunable(make: Callable[[nn.Module], nn.Module]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        scripted = make(nn.Sequential(nn.Linear(8, 8)))
    with pytest.raises(UnsupportedError, match="TorchScript"):
        uniform("bf16").apply(scripted)
    assert list(tunable_units(nn.Sequential(scripted, nn.Linear(8, 8)))) == ["1"]


@pytest.mark.parametrize("frozen", [False, True])
def test_a_scaled_layer_that_is_differentiated_twice_is_named(frozen: bool) -> None:
    model = nn.Sequential(nn.Linear(16, 16, bias=False))  # one layer: what arrives in its backward is a constant
    model[0].weight.requires_grad_(not frozen)
    uniform("fp8_rowwise").apply(model)
    x = torch.randn(16, 16, requires_grad=True)
    out = model(x)
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    assert slope.isfinite().all()  # a first derivative may be asked for in this way
    with pytest.raises(RuntimeError, match="layer '0' cannot be differentiated twice"):
        (out.square().mean() + slope.square().mean()).backward()


def test_transforms_of_torch_func_name_the_scaled_layer() -> None:
    model = nn.Sequential(nn.Linear(16, 16))
    uniform("fp8_rowwise").apply(model)
    with pytest.raises(UnsupportedError, match="layer '0': the transforms"):
        torch.func.vmap(model)(torch.randn(2, 16, 16))


def test_shapes_are_computed_on_the_meta_device() -> None:
    model = nn.Sequential(nn.Linear(16, 32, device="meta"))
    uniform("fp8_rowwise", activations="bf16").apply(model)
    assert model(torch.empty(8, 16, device="meta")).shape == (8, 32)


@pytest.mark.parametrize("call", ["apply", "wrap_optimizer"])
def test_what_is_not_a_model_or_an_optimizer_is_told_so(call: str) -> None:
    """`apply(None)` and `wrap_optimizer(model)` raised AttributeError."""
    wrong = {"apply": None, "wrap_optimizer": nn.Linear(2, 2)}[call]
    with pytest.raises(UsageError) as error:
        getattr(Policy(), call)(wrong)
    assert error.value.code == "type"
