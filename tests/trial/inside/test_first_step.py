"""The first training step of a script: where it is looked for, and when the search is given up."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from autoprec.applying.compiling import is_compiled
from autoprec.trial.inside.first_step import _MOST_UNOWNED, FirstStep
from autoprec.trial.inside.observe.discovery import Found
from autoprec.trial.inside.observe.hooks import Hooks
from autoprec.trial.inside.observe.loose import LooseWeights


@pytest.mark.parametrize("with_optimizer", [False, True])
def test_a_script_without_modules_is_not_searched_at_every_step(
    with_optimizer: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    searches: list[int] = []
    monkeypatch.setattr("autoprec.trial.inside.first_step.discover", lambda *_, **__: searches.append(1))
    weight = torch.ones(3, requires_grad=True)
    optimizers = [torch.optim.SGD([weight])] if with_optimizer else []
    hooks: Any = SimpleNamespace(functional=None, backwards=1, optimizers=optimizers)
    reasons: list[str] = []
    first = FirstStep(hooks, lambda *_: None, reasons.append)
    assert first.why() == ""
    for step in range(1000):
        if step == 3:
            assert first.why() == "no_module"  # a script that ends here is told the same
        if with_optimizer:
            first.after_step(optimizers[0])
        else:
            first.before_backward((weight.sum(),))
    assert _MOST_UNOWNED <= len(searches) <= _MOST_UNOWNED + 10
    assert set(reasons) == {"no_module"}  # the process ends at the first of them, or goes on where it is not a host


def test_what_a_script_names_is_taken_at_its_first_boundary_and_models_to_pass_over_are_not() -> None:
    hooks, got = Hooks(), list[Found]()
    first = FirstStep(hooks, lambda found, *_: got.append(found), lambda _: None)
    first.watch()
    model = nn.Linear(2, 2)
    named = Found([model], [], list(model.parameters()), [])
    first.boundary(model)
    assert got == []
    first.register(named)
    first.boundary(model)
    first.boundary(model)
    assert got == [named]
    assert first.found is named
    assert hooks.events is not first


def test_a_model_is_passed_over_and_its_optimizers_with_it() -> None:
    models = [nn.Linear(2, 2), nn.Linear(2, 2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    hooks: Any = SimpleNamespace(functional=None, backwards=0, optimizers=optimizers[:1], unwatch=lambda: None)
    got = list[Found]()
    first = FirstStep(hooks, lambda found, *_: got.append(found), lambda _: None)
    first.pass_over = 1
    first._on_training_call(models[0], (), {})
    assert (got, first.optimizers()) == ([], [])
    hooks.optimizers = optimizers
    first._on_training_call(models[1], (), {})
    assert [found.root for found in got] == [models[1]]


@pytest.mark.parametrize(("judges", "pass_over"), [(False, 0), (True, 0), (True, 1)])
@pytest.mark.parametrize("how", ["by hand", "by grad", "by an optimizer"])
def test_tensors_that_are_fitted_before_a_model_are_judged_or_passed_over(
    how: str, judges: bool, pass_over: int
) -> None:
    hooks, got = Hooks(), list[Found]()
    weight, net = torch.ones(3, requires_grad=True), nn.Linear(3, 1)
    hooks.install()
    try:
        first = FirstStep(hooks, lambda found, *_: got.append(found), lambda _: None, judges=judges)
        first.pass_over = pass_over
        first.watch()
        own = torch.optim.SGD([weight], lr=0.1) if how == "by an optimizer" else None
        for _ in range(_MOST_UNOWNED + 5):
            if how == "by grad":
                weight.data -= 0.1 * torch.autograd.grad((weight * 2).square().sum(), weight)[0]
                continue
            (weight * 2).square().sum().backward()
            if own is not None:
                own.step()
            elif weight.grad is not None:
                weight.data -= 0.1 * weight.grad
        fitted = [type(found.root) for found in got]
        got.clear()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        if not fitted:
            net(torch.ones(2, 3)).sum().backward()
        del optimizer
    finally:
        hooks.remove()
    assert fitted == ([LooseWeights] if judges and not pass_over else [])
    assert [found.root for found in got] == ([] if fitted else [net])


def test_parameters_that_no_module_calls_are_found_at_the_second_backward() -> None:
    hooks, got = Hooks(), list[Found]()
    held = nn.ParameterDict({"a": torch.ones(3)})
    hooks.install()
    try:
        FirstStep(hooks, lambda found, *_: got.append(found), lambda _: None, judges=True).watch()
        for seen in ([], [held]):
            held["a"].square().sum().backward()
            assert [found.root for found in got] == seen
        assert hooks.unseen is held
    finally:
        hooks.remove()


def _step(how: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[torch.Tensor], None]:
    """Return a training step of which a part is compiled that has the model's call in it, or has not."""
    compiled = torch.compile(backend="eager")

    def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model(x).square().mean()

    def whole(model: nn.Module, x: torch.Tensor) -> None:
        optimizer.zero_grad()
        loss_of(model, x).backward()
        optimizer.step()

    if how == "the training step":
        run = compiled(whole)
        return lambda x: run(model, x)
    names = {"a loss that is given the model": loss_of, "a loss around it": lambda _model, x: loss_of(model, x)}
    given = compiled(names[how]) if how in names else loss_of
    of_output = compiled(lambda out: out.square().mean())

    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        (of_output(model(x)) if how == "a loss of its output" else given(model, x)).backward()
        optimizer.step()

    return step


@pytest.mark.filterwarnings("ignore")  # Dynamo's, of what it goes through
@pytest.mark.parametrize(
    ("how", "registered", "seen"),
    [
        ("the training step", False, 2),
        ("the training step", True, 2),
        ("a loss that is given the model", False, 2),
        ("a loss around it", False, 2),
        ("a loss around it", True, 2),
        ("a loss of its output", False, 1),
        ("a loss of its output", True, 1),
        ("nothing", False, 1),
    ],
)
def test_a_model_that_a_compiled_function_calls_is_found_in_a_step_of_eager_code(
    how: str, registered: bool, seen: int
) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    hooks, got = Hooks(), list[tuple[int, Found, nn.Module]]()
    hooks.install()
    steps = 0
    try:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        first = FirstStep(hooks, lambda found, module, *_: got.append((steps, found, module)), lambda _: None)
        first.watch()
        if registered:
            first.register(Found([model], [optimizer], list(model.parameters())))
        step = _step(how, model, optimizer)
        for steps in range(1, 4):  # noqa: B007 - read where it is found
            step(torch.randn(3, 4))
        stance = torch._dynamo.eval_frame._stance.stance
    finally:
        hooks.remove()
        torch.compiler.set_stance("default")
    (at, found, called), *rest = got
    assert (at, found.root, called, rest, stance) == (seen, model, model, [], "default")
    assert not found.notes
    assert is_compiled(model) is (seen == 2)
