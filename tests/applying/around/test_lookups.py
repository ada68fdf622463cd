"""The gradient of embeddings is shrunk behind the look-up, exactly, and nothing else is changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from autoprec.applying.policy import TorchPolicy
from autoprec.precision.recipes import BUILTIN_RECIPES

#: A power of two: then every gradient is so many times the whole one to the bit.
SHARE = 0.125
IDS = torch.randint(16, (4, 5), generator=torch.Generator().manual_seed(3))


class Plain(nn.Module):
    """One table and a layer behind it."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.table, self.layer = nn.Embedding(16, 8, **settings), nn.Linear(8, 4)

    def forward(self, ids: Tensor) -> Tensor:
        return self.layer(self.table(ids).tanh())


class Two(Plain):
    """Tokens and positions."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Embedding(5, 8)

    def forward(self, ids: Tensor) -> Tensor:
        return self.layer((self.table(ids) + self.positions(torch.arange(5))).tanh())


class Scaled(nn.Embedding):
    """A subclass with a parameter of its own, as several language models have."""

    def __init__(self) -> None:
        super().__init__(16, 8)
        self.gain = nn.Parameter(torch.ones(8))

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) * self.gain


class OfSubclass(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.table = Scaled()


class Raw(nn.Module):
    """A table without a module, as Megatron's is."""

    def __init__(self, *, named: bool = False) -> None:
        super().__init__()
        self.table, self.layer, self.named = nn.Parameter(torch.randn(16, 8)), nn.Linear(8, 4), named

    def forward(self, ids: Tensor) -> Tensor:
        found = F.embedding(input=ids, weight=self.table) if self.named else F.embedding(ids, self.table)
        return self.layer(found.tanh())


class Builtin(Raw):
    def forward(self, ids: Tensor) -> Tensor:
        return self.layer(torch.embedding(self.table, ids).tanh())


class Bag(nn.Module):
    def __init__(self, mode: str, **settings: Any) -> None:
        super().__init__()
        self.table, self.layer = nn.EmbeddingBag(16, 8, mode=mode, **settings), nn.Linear(8, 4)

    def forward(self, ids: Tensor) -> Tensor:
        return self.layer(self.table(ids).tanh())


class Weighted(nn.Module):
    """Its rows are multiplied by factors that train: their gradient is not the table's."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.factors = nn.EmbeddingBag(16, 8, mode="sum"), nn.Parameter(torch.rand(4, 5))
        self.layer = nn.Linear(8, 4)

    def forward(self, ids: Tensor) -> Tensor:
        return self.layer(self.table(ids, per_sample_weights=self.factors).tanh())


class InPlace(Plain):
    def forward(self, ids: Tensor) -> Tensor:
        found = self.table(ids)
        found += 1.0
        return self.layer(found)


class Recomputed(Plain):
    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant

    def forward(self, ids: Tensor) -> Tensor:
        def body(_: Tensor) -> Tensor:
            return self.layer(self.table(ids).tanh())

        out: Tensor = checkpoint(body, torch.zeros((), requires_grad=True), use_reentrant=self.reentrant)
        return out


KINDS: dict[str, Callable[[], nn.Module]] = {
    "embedding": Plain,
    "padding": lambda: Plain(padding_idx=3),
    "sparse": lambda: Plain(sparse=True),
    "max_norm": lambda: Plain(max_norm=0.5),
    "by frequency": lambda: Plain(scale_grad_by_freq=True),
    "two tables": Two,
    "subclass": OfSubclass,
    "raw": Raw,
    "raw, named": lambda: Raw(named=True),
    "builtin": Builtin,
    "bag, sum": lambda: Bag("sum"),
    "bag, mean": lambda: Bag("mean"),
    "bag, max": lambda: Bag("max"),
    "bag, sparse": lambda: Bag("sum", sparse=True),
    "bag, weighted": Weighted,
    "in place": InPlace,
    "recomputed": lambda: Recomputed(reentrant=False),
    "recomputed, reentrant": lambda: Recomputed(reentrant=True),
}
TABLES = ("table", "positions")


def policy(share: float = SHARE, **others: Any) -> TorchPolicy:
    return TorchPolicy.model_validate({"embedding_gradient": share, **others})


def made(kind: str) -> nn.Module:
    torch.manual_seed(0)
    return KINDS[kind]()


def step(model: nn.Module, call: Callable[[Tensor], Tensor] | None = None) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the output of a forward, and every gradient after the backward."""
    model.zero_grad()
    out = (model if call is None else call)(IDS)
    out.square().sum().backward()
    gradients = {name: p.grad.to_dense().clone() for name, p in model.named_parameters() if p.grad is not None}
    return out.detach(), gradients


def is_table(name: str) -> bool:
    return name.partition(".")[0] in TABLES and not name.endswith("gain")


@pytest.mark.parametrize("kind", KINDS)
def test_the_table_gets_a_share_of_its_gradient_and_all_else_gets_what_it_did(kind: str) -> None:
    model = made(kind)
    plain, whole = step(model)
    asked = policy()
    asked.apply(model)
    same, shrunk = step(model)
    assert torch.equal(same, plain)
    assert any(map(is_table, whole))
    for name, gradient in whole.items():
        assert torch.equal(shrunk[name], gradient * (SHARE if is_table(name) else 1.0)), name
        assert gradient.any()
    row = asked.audit(model).operators["embedding_gradient"]
    assert (row["requested"], row["executed"], row["ok"]) == ("0.125", "0.125", True)
    assert row["reason"] == "behind each look-up in " + ", ".join(name for name in whole if is_table(name))
    asked.remove(model)
    again, unchanged = step(model)
    assert torch.equal(again, plain)
    assert all(torch.equal(unchanged[name], gradient) for name, gradient in whole.items())


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # Dynamo does it itself
@pytest.mark.parametrize("kind", ["embedding", "sparse", "max_norm", "raw, named", "bag, weighted", "in place"])
def test_a_compiled_model_does_the_same(kind: str) -> None:
    torch._dynamo.reset()
    model = made(kind)
    plain, whole = step(model, torch.compile(model, backend="aot_eager"))
    asked = policy()
    asked.apply(model)
    same, shrunk = step(model, torch.compile(model, backend="aot_eager"))
    assert torch.equal(same, plain)
    assert all(torch.equal(shrunk[n], g * (SHARE if is_table(n) else 1.0)) for n, g in whole.items())
    row = asked.audit(model).operators["embedding_gradient"]
    assert (row["executed"], row["ok"], row["reason"]) == ("-", True, "inside a compiled graph")
    asked.remove(model)
    torch._dynamo.reset()
    assert all(torch.equal(g, whole[n]) for n, g in step(model)[1].items())


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(16, 8), nn.Linear(8, 16, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor, *, cut: str = "") -> Tensor:
        found = self.embed(ids)
        return self.head((found.detach() if cut == "look-up" else found).tanh())


@pytest.mark.parametrize("recipe", ["", "bf16", "fp8_rowwise"])
def test_of_a_tied_table_the_output_layer_keeps_all_of_its_gradient(recipe: str) -> None:
    others: dict[str, Any] = {}
    if recipe:
        others = {"recipes": {recipe: BUILTIN_RECIPES[recipe]}, "default": recipe}
    torch.manual_seed(0)
    model = Tied()
    asked = policy(1.0, **others)
    asked.apply(model)
    _, whole = step(model)
    _, output_alone = step(model, lambda ids: model(ids, cut="look-up"))
    asked.remove(model)
    policy(SHARE, **others).apply(model)
    _, shrunk = step(model)
    expected = output_alone["embed.weight"] + SHARE * (whole["embed.weight"] - output_alone["embed.weight"])
    torch.testing.assert_close(shrunk["embed.weight"], expected, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(shrunk["embed.weight"], whole["embed.weight"] * SHARE, rtol=1e-2)


def test_it_is_what_glm_130b_writes_by_hand() -> None:
    class ByHand(Plain):
        def forward(self, ids: Tensor) -> Tensor:
            found = self.table(ids)
            return self.layer((found * 0.1 + found.detach() * 0.9).tanh())

    torch.manual_seed(0)
    model, other = made("embedding"), ByHand()
    other.load_state_dict(model.state_dict())
    policy(0.1).apply(model)
    out, ours = step(model)
    theirs_out, theirs = step(other)
    torch.testing.assert_close(out, theirs_out)
    for name in theirs:
        torch.testing.assert_close(ours[name], theirs[name])


def test_under_autocast_it_is_the_same_share() -> None:
    model = made("two tables")
    around = policy(1.0, activations="bf16")
    around.apply(model)
    plain, whole = step(model)
    around.remove(model)
    policy(SHARE, activations="bf16").apply(model)
    same, shrunk = step(model)
    assert torch.equal(plain, same)
    assert all(torch.equal(shrunk[n], g * (SHARE if is_table(n) else 1.0)) for n, g in whole.items())


def test_functional_transforms_see_it_too() -> None:
    model = made("embedding")
    named = dict(model.named_parameters())

    def loss(given: dict[str, Tensor], ids: Tensor) -> Tensor:
        return torch.func.functional_call(model, given, (ids,)).square().sum()

    whole = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(named, IDS)
    policy().apply(model)
    shrunk = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(named, IDS)
    assert torch.equal(shrunk["table.weight"], SHARE * whole["table.weight"])
    assert torch.equal(shrunk["layer.weight"], whole["layer.weight"])


def test_without_gradients_nothing_is_copied() -> None:
    model = made("embedding")
    policy().apply(model)
    with torch.no_grad():
        assert not model(IDS).requires_grad
    model.table.weight.requires_grad_(False)  # type: ignore[union-attr]
    _, gradients = step(model)
    assert set(gradients) == {"layer.weight", "layer.bias"}


@pytest.mark.parametrize(
    ("case", "why"),
    [
        ("no table", "no embedding with a table that trains"),
        ("frozen", "no embedding with a table that trains"),
        ("never called", "the model was not called, only its parts were"),
        ("not applied", "the policy is not applied"),
    ],
)
def test_what_was_asked_for_and_did_not_run_is_a_failed_check(case: str, why: str) -> None:
    model: nn.Module = nn.Sequential(nn.Linear(5, 4)) if case == "no table" else made("embedding")
    if case == "frozen":
        model.table.weight.requires_grad_(False)  # type: ignore[union-attr]
    asked = policy()
    if case != "not applied":
        asked.apply(model)
    if case != "never called":
        model(torch.rand(4, 5) if case == "no table" else IDS).sum().backward()
    report = asked.audit(model)
    row = report.operators["embedding_gradient"]
    assert (row["executed"], row["ok"]) == ("-", False)
    assert row["reason"].startswith(why)
    assert not report.ok


def test_a_policy_without_it_has_no_row() -> None:
    model = made("embedding")
    asked = policy(1.0)
    asked.apply(model)
    step(model)
    assert "embedding_gradient" not in asked.audit(model).operators


def test_a_phase_may_end_it() -> None:
    model = made("embedding")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    _, whole = step(model)
    asked = policy(SHARE, phases=[{"from": 2, "embedding_gradient": 1.0}])
    asked.apply(model)
    asked.wrap_optimizer(optimizer)
    seen = []
    for _ in range(3):
        seen.append(step(model)[1]["table.weight"])
        optimizer.step()
    assert [torch.equal(gradient, SHARE * whole["table.weight"]) for gradient in seen] == [True, True, False]
    assert torch.equal(seen[2], whole["table.weight"])


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace:DeprecationWarning")
def test_a_traced_model_is_an_inference_model() -> None:
    model = made("embedding")
    policy().apply(model)
    traced = torch.jit.trace(model, (IDS,), check_trace=False)  # type: ignore[no-untyped-call]
    assert torch.equal(traced(IDS), model(IDS))
