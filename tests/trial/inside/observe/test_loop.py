"""Counting steps."""

from __future__ import annotations

import gc
import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from autoprec.trial.inside.observe.discovery import Found
from autoprec.trial.inside.observe.hooks import Hooks
from autoprec.trial.inside.observe.loop import ANNEAL_END, Loop, _kept, _sum, annealed, early_stop, out_of_time
from autoprec.trial.inside.observe.loose import LooseWeights
from autoprec.trial.inside.observe.measure import CpuClock


@given(st.integers(2, 500))
def test_annealing_goes_down_from_one(total: int) -> None:
    factors = [annealed(i, total) for i in range(total)]
    assert factors[0] == 1.0
    assert math.isclose(factors[-1], ANNEAL_END)
    assert all(a >= b for a, b in itertools.pairwise(factors))
    assert annealed(0, 1) == 1.0


def test_early_stop_looks_at_the_last_quarter() -> None:
    reference = [1.0] * 100
    assert not early_stop([1.0] * 50, reference, 0.01, 100)
    assert early_stop([1.0] * 40 + [1.1] * 10, reference, 0.05, 100)
    assert not early_stop([9.0] * 3, reference, 0.01, 100)  # too few to say
    assert not early_stop([9.0] * 40 + [1.0] * 20, reference, 0.05, 100)  # it has recovered


@pytest.mark.parametrize(
    ("each_s", "within_s", "says"),
    [
        (0.0, 8.0, "1 of 23 steps was done, and 23 steps take more than the 8 s that were left"),
        (2.5, 30.4, "a step takes 2.5 s, and 23 steps take more than the 30 s that were left"),
        (0.0, 0.0, "1 of 23 steps was done, and the time budget was used up"),
        (0.0, -4.0, "1 of 23 steps was done, and the time budget was used up"),
        (2.5, 0.4, "a step takes 2.5 s, and the time budget was used up"),
    ],
)
def test_no_seconds_that_were_left_are_none_or_negative(each_s: float, within_s: float, says: str) -> None:
    assert out_of_time(1, 23, each_s, within_s) == says


def run(model: nn.Module, optimizer: Any, steps: int, **options: Any) -> Loop:
    class EnoughError(Exception):
        pass

    def then(_loop: Loop) -> None:
        raise EnoughError

    found = Found([model], [optimizer] if optimizer else [], list(model.parameters()))
    hooks = Hooks()
    hooks.install()
    loop = Loop(found, total=steps, clock=CpuClock(), then=then, **options)
    hooks.events = loop
    torch.manual_seed(0)
    try:
        loop.start()
        for _ in range(steps + 5):
            loss = model(torch.randn(4, 3)).square().mean()
            if optimizer is not None:
                optimizer.zero_grad()
            loss.backward()
            if optimizer is not None:
                nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
                optimizer.step()
    except EnoughError:
        pass
    finally:
        hooks.remove()
    return loop


def test_losses_times_and_memory() -> None:
    model = nn.Linear(3, 5)
    loop = run(model, torch.optim.AdamW(model.parameters()), 4, count_memory=True)
    assert loop.steps == len(loop.losses) == len(loop.clock.milliseconds()) == 4
    parameters = 4 * (3 * 5 + 5)
    assert loop.peak_bytes >= 4 * parameters + 4 * 4 * 3  # gradients, two moments, and the input at least
    assert run(model, torch.optim.AdamW(model.parameters()), 4).peak_bytes == 0


def test_steps_beyond_those_asked_for_are_said_to_be_skipped_ones() -> None:
    """A script whose scaler skips every step was said to have ended "after 6 of 2 steps"."""
    model = nn.Linear(3, 5)
    loop = run(model, torch.optim.SGD(model.parameters()), 4)
    assert loop.taken == "4 of 4 steps"
    loop.steps, loop.total, loop.skipped = 6, 2, 5
    assert loop.taken == "6 steps, of which the gradient scaler skipped 5"
    loop.total = 9
    assert loop.taken == "6 of 9 steps"


def test_an_annealed_rate_is_put_back_after_each_step() -> None:
    model = nn.Linear(3, 5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    run(model, optimizer, 3, anneal=True)
    assert optimizer.param_groups[0]["lr"] == 0.5
    del optimizer.param_groups[0]["lr"]  # an optimizer of a script's own keeps its rate where it likes
    loop = Loop(
        Found([model], [optimizer], [model.weight]), total=3, clock=CpuClock(), then=lambda _: None, anneal=True
    )
    loop.gradients_ready(optimizer)
    assert "lr" not in optimizer.param_groups[0]


def test_on_a_cpu_no_tensor_of_a_step_stays() -> None:
    """It would lie on the heap above what the step frees, and keep that from the system."""
    living: list[int] = []

    def count(_loop: Loop) -> None:
        gc.collect()
        living.append(sum(issubclass(type(each), torch.Tensor) for each in gc.get_objects()))

    model = nn.Linear(3, 5)
    run(model, torch.optim.SGD(model.parameters(), lr=0.1), 6, check=count)
    assert len(set(living[2:])) == 1


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_losses_that_are_numbers_and_tensors_add_up(kind: torch.dtype) -> None:
    exact = torch.tensor(0.1, dtype=kind)
    assert _kept(exact) == float(exact)
    held = exact.double()  # as on a GPU
    assert float(_sum([_kept(exact), held], torch.device("cpu"))) == pytest.approx(2 * float(exact))
    assert _sum([0.25, 0.5], torch.device("cpu")) == 0.75
    assert math.isnan(_sum([], torch.device("cpu")))


def test_without_an_optimizer_each_backward_is_a_step() -> None:
    assert run(nn.Linear(3, 5), None, 3).steps == 3


def test_a_vector_loss_counts_as_its_weighted_sum_where_nothing_else_does() -> None:
    class EnoughError(Exception):
        pass

    def then(_loop: Loop) -> None:
        raise EnoughError

    model = nn.Linear(3, 4, bias=False)
    nn.init.ones_(model.weight)
    optimizer, hooks = torch.optim.SGD(model.parameters(), lr=0.0), Hooks()
    hooks.install()
    loop = Loop(Found([model], [optimizer], [model.weight]), total=3, clock=CpuClock(), then=then)
    hooks.events = loop
    try:
        loop.start()
        model(torch.ones(3)).backward(torch.full((4,), 0.25))
        optimizer.step()
        torch.autograd.backward([model(torch.ones(3))], grad_tensors=[torch.full((4,), 0.5)])
        optimizer.step()
        out = model(torch.ones(3))  # a stage's gradient beside a true loss is not a loss
        out.backward(torch.ones(4), retain_graph=True)
        out.mean().backward()
        with pytest.raises(EnoughError):
            optimizer.step()
    finally:
        hooks.remove()
    assert loop.losses == [3.0, 6.0, 3.0]


@pytest.mark.parametrize("loose", [False, True])
def test_tensors_of_no_module_fall_silent_where_an_optimizer_of_others_steps(loose: bool) -> None:
    weight, net = torch.ones(3, requires_grad=True), nn.Linear(3, 1)
    root = LooseWeights([weight]) if loose else net
    other, own = torch.optim.SGD(net.parameters()), torch.optim.SGD([weight])
    silent: list[object] = []
    found = Found([root], [], list(root.parameters()))
    loop = Loop(found, total=50, clock=CpuClock(), then=lambda _: None, silent=silent.append)
    for _ in range(3):
        loop.after_step(other)
    assert silent == ([other] if loose else [])
    loop.after_step(own)
    assert loop.steps == (1 if loose else 4)
