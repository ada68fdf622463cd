"""Casts of weights that are kept over micro-batches: as many casts as steps, and the same training bit for bit."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autoprec import Policy
from autoprec.applying.swap import execution_of
from autoprec.errors import AutoPrecWarning
from autoprec.numerics import kept, linear
from autoprec.numerics.kept import KeptCasts
from autoprec.precision.recipes import BUILTIN_RECIPES

RECIPES = ["fp8_tensorwise", "fp8_rowwise", "fp8_block_fp32_scales", "mxfp8", "int8", "fp8_delayed", "nvfp4"]


def _model(recipe: str) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 128))
    Policy.model_validate({"default": "r", "recipes": {"r": BUILTIN_RECIPES[recipe]}}).apply(model)
    return model


def _train(
    model: nn.Module,
    *,
    steps: int = 3,
    batches: int = 4,
    between: Callable[[nn.Module, int], Any] = lambda *_: None,
    optimizer: str = "SGD",
) -> list[Tensor]:
    """Train for some steps of some micro-batches; return weights after every step."""
    step = getattr(torch.optim, optimizer)(model.parameters(), lr=0.05)
    draw, seen = torch.Generator().manual_seed(1), []
    for _ in range(steps):
        for batch in range(batches):
            (model(torch.randn(16, 128, generator=draw)).square().mean() / batches).backward()
            between(model, batch)
        step.step()
        step.zero_grad()
        seen.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    return seen


@pytest.fixture
def casts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Note each weight that is cast."""
    made: list[str] = []
    plain = linear.quantize

    def quantize(x: Tensor, spec: Any, *, operand: str = "input", **more: Any) -> Any:
        if operand == "weight":
            made.append(operand)
        return plain(x, spec, operand=operand, **more)

    monkeypatch.setattr(linear, "quantize", quantize)
    return made


def _never(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KeptCasts, "get", lambda *_: None)


def test_a_weight_is_cast_once_a_step(casts: list[str]) -> None:
    """The first step casts twice: that there are micro-batches is known from its second forward on."""
    model = _model("fp8_tensorwise")
    _train(model, steps=1)
    assert len(casts) == 2 * 2
    casts.clear()
    _train(model, steps=1)
    assert len(casts) == 2 * 1


def test_nothing_is_kept_where_each_step_has_one_forward() -> None:
    model = _model("fp8_rowwise")
    _train(model, batches=1)
    layers = [execution_of(module) for module in model.modules() if isinstance(module, nn.Linear)]
    assert [layer.kept._made for layer in layers] == [{}, {}]
    _train(model, batches=2)
    assert all(layer.kept._made for layer in layers)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
def test_training_is_the_same_bit_for_bit(recipe: str, optimizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = _train(_model(recipe), optimizer=optimizer)
    _never(monkeypatch)
    for one, other in zip(ours, _train(_model(recipe), optimizer=optimizer), strict=True):
        assert torch.equal(one, other)


def _through_data(model: nn.Module, batch: int) -> None:
    for parameter in model.parameters():
        parameter.data.mul_(1.5 if batch % 2 else 1 / 1.5)


def _in_place(model: nn.Module, batch: int) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5 if batch % 2 else 1 / 1.5)


def _other_memory(model: nn.Module, batch: int) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data * (1.5 if batch % 2 else 1 / 1.5)


def _one_element(model: nn.Module, batch: int) -> None:
    with torch.no_grad():
        next(model.parameters())[3, 5] += 1.0


def _one_element_through_data(model: nn.Module, batch: int) -> None:
    next(model.parameters()).data[3, 5] += 1.0


@pytest.mark.parametrize("between", [_through_data, _in_place, _other_memory, _one_element, _one_element_through_data])
def test_a_weight_that_is_written_between_micro_batches_is_cast_again(
    between: Callable[[nn.Module, int], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Adversarial weight perturbation writes through ``.data``, which bumps no version."""
    ours = _train(_model("fp8_tensorwise"), between=between)
    _never(monkeypatch)
    for one, other in zip(ours, _train(_model("fp8_tensorwise"), between=between), strict=True):
        assert torch.equal(one, other)


def test_an_optimizer_that_writes_through_data_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    class Old(torch.optim.Optimizer):
        def __init__(self, parameters: Any, lr: float) -> None:
            super().__init__(parameters, {"lr": lr})

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for p in group["params"]:
                    p.data.add_(p.grad.data, alpha=-group["lr"])

    monkeypatch.setattr(torch.optim, "Old", Old, raising=False)
    ours = _train(_model("fp8_tensorwise"), optimizer="Old")
    _never(monkeypatch)
    for one, other in zip(ours, _train(_model("fp8_tensorwise"), optimizer="Old"), strict=True):
        assert torch.equal(one, other)


def _by_hand(recipe: str, *, first: int, columns: int) -> Tensor:
    """Train without an optimizer, through ``.data``, on inputs that begin with zeros; return the first weight."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(columns, 64), nn.ReLU(), nn.Linear(64, 10))
    Policy.model_validate({"default": "r", "recipes": {"r": BUILTIN_RECIPES[recipe]}}).apply(model)
    x = torch.rand(32, columns, generator=torch.Generator().manual_seed(1))
    x[:, :first] = 0.0
    for _ in range(5):
        model.zero_grad()
        model(x).square().mean().backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.data.sub_(parameter.grad.data * 0.5)
    return next(model.parameters()).detach()


@pytest.mark.parametrize("recipe", ["int8", "fp8_rowwise", "mxfp8"])
@pytest.mark.parametrize("columns", [784, 77])
def test_a_loop_without_an_optimizer_trains_where_an_input_is_always_zero(
    recipe: str, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The border of an image: the weight's first columns never change, and all others do."""
    ours = _by_hand(recipe, first=20, columns=columns)
    _never(monkeypatch)
    assert torch.equal(ours, _by_hand(recipe, first=20, columns=columns))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("shape", [(64, 784), (3, 5), (65, 77), (1, 1)])
def test_any_element_that_is_written_is_seen(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    flat = torch.zeros(1 + shape[0] * shape[1], dtype=dtype)
    for weight in (torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype).t(), flat[1:].view(shape)):
        before = kept.sampled(weight)
        assert torch.equal(before, kept.sampled(weight))
        weight[-1, -1] = 1.0
        assert not torch.equal(before, kept.sampled(weight))


def test_a_copy_and_a_pickle_begin_without_casts() -> None:
    weight = nn.Parameter(torch.randn(8, 8))
    one = KeptCasts()
    one.begin(weight)
    one.begin(weight)
    one._sample = torch.ones(1)
    for other in (copy.deepcopy(one), pickle.loads(pickle.dumps(one))):
        assert (other._forwards, other._sample) == (0, None)


def test_a_device_that_answers_later_is_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU the host does not wait: that weights were written is known a step later, and ends the keeping."""

    class Event:
        def record(self, stream: object) -> None: ...

        def query(self) -> bool:
            return True

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch, "empty", lambda *_, **__: torch.zeros((), dtype=torch.bool))
    process = kept._Process()
    process.note(torch.tensor(False))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        process.stepped()
        process.stepped()
    process.note(torch.tensor(True))
    process.stepped()
    assert not process.off
    with pytest.warns(AutoPrecWarning, match=r"written between two micro-batches"):
        process.stepped()
    assert process.off
