from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from autoprec.applying.policy import apply_policy, remove_policy
from autoprec.cost import CostModel
from autoprec.cost.peak import Lifetimes, timeline
from autoprec.cost.saved import Setting
from autoprec.graph.recorder import StepRecorder
from autoprec.graph.report import GraphReport
from autoprec.policy import policy_from_dict, resolve
from autoprec.precision.hardware import TARGETS

BF16 = {"format": "bf16"}
INT8 = {"format": "int8", "scaling": {"granularity": "tensor"}}
POLICIES: dict[str, dict[str, Any]] = {
    "script": {},
    "bf16": {"recipes": {"low": BF16}, "default": "low", "activations": "bf16"},
    "int8": {"recipes": {"low": INT8}, "default": "low"},
    "int8 in bf16": {"recipes": {"low": INT8}, "default": "low", "activations": "bf16"},
    "bf16 alone": {"recipes": {"low": BF16}, "default": "low"},
}


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(F.gelu(self.up(self.norm(x))))
        return out


class Model(nn.Module):
    def __init__(self, *, again: bool) -> None:
        super().__init__()
        self.again, self.h, self.head = again, nn.ModuleList(Block(64) for _ in range(3)), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.h:
            x = checkpoint(block, x, use_reentrant=False) if self.again else block(x)
        return self.head(x).float().square().mean()


def measured(step: Callable[[], Any]) -> int:
    """Return the allocator's peak over a step, beside what was there before."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, acc_events=True
    ) as profiler:
        step()
    now = most = 0
    events: Any = profiler.profiler
    rows = [event for event in events.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(rows, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most


def recorded(*, again: bool) -> tuple[Model, Callable[[], Any], GraphReport]:
    torch.manual_seed(0)
    model, x = Model(again=again), torch.randn(512, 64)

    def step() -> None:
        model(x).backward()

    with StepRecorder(model) as recorder:
        step()
    return model, step, recorder.report()


def peaks(model: nn.Module, step: Callable[[], Any], report: GraphReport, policy: str) -> tuple[int, int]:
    """Return the modelled and the measured peak of a step under a policy, beside its parameters, in bytes."""
    asked = policy_from_dict({"schema": "autoprec.policy/1", **POLICIES[policy]})
    model.zero_grad()
    apply_policy(asked, model)
    step()
    model.zero_grad()
    found = measured(step)
    remove_policy(model)
    plans = resolve(asked, [layer.name for layer in report.tunable])
    modelled = CostModel(report, TARGETS["cpu"]).memory(plans, activations=asked.activations)
    assert modelled is not None
    return modelled.total - modelled.parameters, found


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("policy", ["script", "bf16", "int8", "int8 in bf16"])
def test_the_peak_is_the_allocators(policy: str, again: bool) -> None:
    """With gradients counted as there from the start, and what backward holds left out, it was -39 to +12 % off.

    With the sum of a bias left out, -14 % in INT8 layers that return bf16 and run again.
    """
    model, step, report = recorded(again=again)
    modelled, found = peaks(model, step, report, policy)
    assert modelled == pytest.approx(found, rel=0.01 if policy == "script" else 0.08)


def test_gradients_live_through_the_forward_pass_where_zero_grad_follows_it() -> None:
    """They were taken to be released before: -13 % on the demo, whose peak is at the end of its forward pass."""
    torch.manual_seed(0)
    model, x = Model(again=False), torch.randn(128, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    reports = []
    for _ in range(2):

        def step() -> None:
            loss = model(x)
            optimizer.zero_grad()
            loss.backward()

        with StepRecorder(model, optimizers=(optimizer,)) as recorder:
            step()
        reports.append(recorder.report())
    modelled = [CostModel(report, TARGETS["cpu"]).memory({}, activations="keep") for report in reports]
    optimizer.zero_grad()
    found = measured(lambda: (step(), step()))  # the profiler knows of no release of what was there before it
    for one in modelled:  # by the first step, too, which has no gradients to begin with
        assert one is not None
        assert one.total - one.parameters == pytest.approx(found, rel=0.02)


@pytest.mark.parametrize("policy", ["script", "bf16", "bf16 alone"])
@pytest.mark.parametrize(("width", "steps", "again"), [(64, 32, False), (192, 8, False), (64, 32, True)])
def test_an_lstm_needs_what_its_kernel_does(width: int, steps: int, again: bool, policy: str) -> None:
    """Casts of weights, their gradients in another order, a dtype without autocast were left out: -30 to +45 %."""
    torch.manual_seed(0)
    model, x = nn.LSTM(width, width, 2, batch_first=True), torch.randn(24, steps, width)

    def step() -> None:
        out = checkpoint(model, x, use_reentrant=False) if again else model(x)
        out[0].square().mean().backward()

    with StepRecorder(model) as recorder:
        step()
    modelled, found = peaks(model, step, recorder.report(), policy)
    assert modelled == pytest.approx(found, rel=0.08)


def test_the_power_of_a_square_lives_to_the_end_of_its_backward() -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(64, 64), torch.randn(512, 64)

    def step() -> None:
        layer(x).pow(3).sum().backward()

    with StepRecorder(layer) as recorder:
        step()
    layer.zero_grad()
    modelled = CostModel(recorder.report(), TARGETS["cpu"]).memory({}, activations="keep")
    assert modelled is not None
    assert modelled.total - modelled.parameters == pytest.approx(measured(step), rel=0.02)


def test_a_result_that_keeps_its_name_through_backward_is_there_all_the_time() -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(64, 64), torch.randn(256, 64)
    for keeps, held in ((False, 0.0), (True, 256 * 64 * 4.0)):
        with StepRecorder(layer) as recorder:
            out = layer(x)
            loss = (out * 2.0).sum()
            out = out if keeps else loss
            loss.backward()
        assert Lifetimes.of(recorder.report()).held == pytest.approx(held, abs=64)


def test_gradients_that_are_added_to_are_there_all_the_time_and_fresh_ones_grow() -> None:
    model, step, report = recorded(again=False)
    fresh = timeline(Lifetimes.of(report), Setting())["gradients"]
    assert (fresh[0], fresh[-1]) == (0.0, report.memory["gradients"])
    with StepRecorder(model) as recorder:
        step()
    added = timeline(Lifetimes.of(recorder.report()), Setting())["gradients"]
    assert added[0] == report.memory["gradients"]


def test_of_several_micro_batches_one_is_there_with_gradients_of_the_models_size() -> None:
    """These were taken for activations: of micro-batches smaller than the weights, a tenth of what fits was named."""
    torch.manual_seed(0)
    most: dict[int, int] = {}
    for parts in (1, 4):
        model = nn.Sequential(nn.Linear(256, 512), nn.Tanh(), nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 32))
        batch = [torch.randn(64, 256) for _ in range(parts)]

        def step(model: nn.Module = model, batch: list[Tensor] = batch) -> None:
            for part in batch:
                model(part).sum().backward()

        with StepRecorder(model) as recorder:
            step()
        report = recorder.report()
        assert (report.batch["samples"], report.batch.get("micro_batches", 1)) == (64 * parts, parts)
        model.zero_grad()
        found, cost = measured(step), CostModel(report, TARGETS["cpu"])
        modelled = cost.memory({})
        assert modelled is not None
        assert modelled.total - modelled.parameters == pytest.approx(found, rel=0.01)
        most[parts] = cost.most_samples({}, 64 * 2**20) or 0
    assert most[4] // 4 == pytest.approx(most[1], rel=0.1)
