"""Delayed scales over ranks: which operands take part, and what one rank does."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from autoprec import Policy
from autoprec.applying.policy import remove_policy
from autoprec.numerics.delayed import steps as delayed
from autoprec.numerics.delayed.steps import DelayedReduction, data_parallel_groups
from autoprec.numerics.linear import LinearExecution
from autoprec.numerics.one_dtype import ConvExecution
from autoprec.policy import LayerPlan
from autoprec.precision.recipes import BUILTIN_RECIPES

DELAYED, BF16 = BUILTIN_RECIPES["fp8_delayed"], BUILTIN_RECIPES["bf16"]


def test_only_delayed_operands_take_part_each_once() -> None:
    conv = ConvExecution(LayerPlan.uniform(BF16), nn.Conv1d(2, 2, 1), "bf16")
    runs: list[Any] = [LinearExecution(LayerPlan.uniform(recipe)) for recipe in (DELAYED, BF16)]
    runs += [conv, LinearExecution(LayerPlan(fprop=DELAYED))]
    slots = DelayedReduction(nn.Linear(2, 2), runs).slots
    assert [operand for _, operand, _ in slots] == ["input", "weight", "grad_output", "input", "weight"]
    assert {id(state) for state, _, _ in slots} == {id(runs[0].quantizers), id(runs[3].quantizers)}


def test_without_other_ranks_a_layer_learns_alone() -> None:
    assert data_parallel_groups(nn.Linear(2, 2)) == []
    model, run = nn.Linear(32, 32), LinearExecution(LayerPlan.uniform(DELAYED))
    reduction = DelayedReduction(model, [run])
    reduction()
    run(torch.ones(4, 32), model.weight, None)
    reduction.end_step()
    assert [scale.history is not None and scale.history.tolist()[:2] for scale in reduction.scales[:1]] == [[1.0, 0.0]]


class Wire:
    """Two ranks of which this process is one; the other has seen 5 of everything."""

    def __init__(self) -> None:
        self.calls = 0

    def get_world_size(self, group: Any) -> int:
        return 2

    def reduced(self, amax: torch.Tensor, groups: tuple[str, ...]) -> torch.Tensor:
        assert groups == ("all",)
        self.calls += 1
        return amax.clamp(min=5.0)


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_ranks_agree_on_the_largest_amax_once_per_step(monkeypatch: pytest.MonkeyPatch, micro_batches: int) -> None:
    wire = Wire()
    monkeypatch.setattr(delayed, "dist", wire)
    monkeypatch.setattr(delayed, "reduced", wire.reduced)
    monkeypatch.setattr(delayed, "data_parallel_groups", lambda root: [SimpleNamespace(group_name="all")])
    model, run = nn.Linear(32, 32), LinearExecution(LayerPlan.uniform(DELAYED))
    reduction, optimizer = DelayedReduction(model, [run]), torch.optim.SGD(model.parameters())
    for step in range(2):
        for _ in range(micro_batches):
            reduction()
            run(torch.ones(4, 32, requires_grad=True), model.weight, None).sum().backward()
        assert wire.calls == step
        optimizer.step()
    assert wire.calls == 2
    _, operand, spec = reduction.slots[0]
    assert run.quantizers.delayed_scale(operand, spec, torch.tensor(1.0), update=False) == 448.0 / 5.0
    model.eval()
    reduction()
    model.train()
    with torch.no_grad():
        reduction()
    optimizer.step()
    assert wire.calls == 2  # evaluation neither learns nor communicates


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x)))


def trained(how: str) -> tuple[list[torch.Tensor], list[Any], int]:
    """Train three steps; return the outputs, the delayed scales, and how many graphs were made."""
    graphs: list[Any] = []

    def backend(graph: Any, _inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch.manual_seed(0)
    torch._dynamo.reset()
    model = Model()
    runs = {name: LinearExecution(LayerPlan.uniform(DELAYED)) for name in ("first", "second")}
    for name, run in runs.items():
        layer = model.get_submodule(name)
        layer.forward = lambda x, run=run, layer=layer: run(x, layer.weight, layer.bias)  # type: ignore[method-assign]
    reduction = DelayedReduction(model, runs.values())

    def whole(x: torch.Tensor) -> torch.Tensor:
        reduction()
        out: torch.Tensor = model(x)
        return out

    run_model = torch.compile(whole, backend=backend, fullgraph=True) if how == "whole" else whole
    if how == "layers":
        for name in runs:
            model.get_submodule(name).compile(backend=backend, fullgraph=True)
    outputs, optimizer = [], torch.optim.SGD(model.parameters(), 0.0)
    for step in range(3):
        out = run_model(torch.randn(16, 32) * 2.0**step)
        out.square().sum().backward()
        optimizer.step()
        outputs.append(out.detach())
    model.eval()
    with torch.no_grad():
        outputs.append(run_model(torch.randn(16, 32)))
    scales = [scale.scale.item() for run in runs.values() for scale in run.quantizers.delayed.values()]
    return outputs, scales, len(graphs)


@pytest.mark.filterwarnings("ignore")  # Dynamo's own deprecations
@pytest.mark.parametrize(("how", "graphs"), [("whole", 3), ("layers", 6)])
def test_compiled_layers_scale_as_eager_ones_and_need_no_graph_break(how: str, graphs: int) -> None:
    """One graph for the first step, which has no history, one for all others, one for evaluation (layers may share)."""
    eager, compiled = trained("eager"), trained(how)
    for one, other in zip(eager[0][:3], compiled[0][:3], strict=True):
        assert torch.equal(one, other)
    assert compiled[2] <= graphs


@pytest.mark.filterwarnings("ignore")  # Dynamo's own deprecations
def test_a_layer_moved_after_its_policy_was_applied_runs_outside_the_graph() -> None:
    layer, run = nn.Linear(32, 32), LinearExecution(LayerPlan.uniform(DELAYED))
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: run(x, layer.weight, layer.bias), backend="eager")
    x = torch.randn(4, 32)
    torch.testing.assert_close(compiled(x), run(x, layer.weight, layer.bias))
    assert run.quantizers.prepared == x.device  # from now on a graph can be traced


@pytest.mark.filterwarnings("ignore")  # Dynamo's own deprecations
def test_compiled_layers_may_run_twice_before_the_backward_pass() -> None:
    """As contrastive losses do: the second forward learns new scales while the first one's are still needed."""

    def gradients(*, compiled: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        layers = [nn.Linear(32, 32), nn.Linear(32, 16)]
        runs = [LinearExecution(LayerPlan.uniform(DELAYED)) for _ in layers]
        for layer, run in zip(layers, runs, strict=True):
            layer.forward = lambda x, run=run, layer=layer: run(x, layer.weight, layer.bias)  # type: ignore[method-assign]
            if compiled:
                layer.compile(backend="aot_eager", fullgraph=True)
        model = nn.Sequential(*layers)
        reduction, optimizer = DelayedReduction(model, runs), torch.optim.SGD(model.parameters(), 0.0)
        for _ in range(4):
            model.zero_grad()
            total = torch.zeros(())
            for size in (1.0, 3.0):
                reduction()
                total = total + model(size * torch.randn(8, 32)).square().mean()
            total.backward()
            optimizer.step()
        return [p.grad for p in model.parameters() if p.grad is not None]

    torch._dynamo.reset()
    for ours, theirs in zip(gradients(compiled=True), gradients(compiled=False), strict=True):
        assert (ours - theirs).norm() < 1e-6 * theirs.norm()


def test_an_operand_that_nobody_has_seen_is_not_scaled_once_others_are() -> None:
    """A loaded scale of before the first amax is 0, and a graph that took it as given would return NaN."""
    model, run = nn.Linear(32, 32), LinearExecution(LayerPlan.uniform(DELAYED))
    reduction = DelayedReduction(model, [run])
    run.quantizers.traced = True
    reduction.end_step()  # no amax of anything yet
    scales = [float(scale.scale) for scale in reduction.scales if scale.scale is not None]
    assert scales == [1.0] * 3
    assert all(scale.given for scale in reduction.scales)
    held = reduction.scales[0].state(torch.device("cpu"))
    reduction.scales[0].load_state(held | {"scale": torch.zeros(())}, torch.device("cpu"))
    assert not reduction.scales[0].given
    reduction.scales[0].give()
    assert float(reduction.scales[0].scale or 0) == 1.0


# ---------------------------------------------------------------- when a step is over
def history(reduction: DelayedReduction, slot: int = 0) -> list[float]:
    held = reduction.scales[slot].history
    return [] if held is None else [round(v, 4) for v in held.tolist() if v]


class Loop:
    """A model of one delayed layer, with forwards of known amaxes."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model, self.run = nn.Linear(32, 32), LinearExecution(LayerPlan.uniform(DELAYED))
        self.reduction = DelayedReduction(self.model, [self.run])

    def loss(self, amax: float, weight: Any = None) -> torch.Tensor:
        self.reduction()
        x = torch.full((4, 32), amax)
        return self.run(x, self.model.weight if weight is None else weight, None).square().mean()


def by_an_optimizer(loop: Loop, amaxes: list[float]) -> None:
    optimizer = torch.optim.AdamW(loop.model.parameters(), 1e-3)
    for amax in amaxes:
        loop.loss(amax).backward()
    optimizer.step()
    optimizer.zero_grad()


def by_two_optimizers(loop: Loop, amaxes: list[float]) -> None:
    held = [torch.optim.SGD([p], 1e-3) for p in loop.model.parameters()]
    for amax in amaxes:
        loop.loss(amax).backward()
    for optimizer in held:
        optimizer.step()


def by_hand(loop: Loop, amaxes: list[float]) -> None:
    for amax in amaxes:
        loop.loss(amax).backward()
    with torch.no_grad():
        loop.model.weight -= 1e-3 * loop.model.weight.grad
    loop.model.zero_grad()
    loop.loss(0.0)


def through_data(loop: Loop, amaxes: list[float]) -> None:
    for amax in amaxes:
        loop.loss(amax).backward()
    loop.model.weight.data -= 1e-3 * loop.model.weight.grad
    loop.model.zero_grad()
    loop.loss(0.0)


def functionally(loop: Loop, amaxes: list[float]) -> None:
    weight = loop.model.weight.detach().clone().requires_grad_()
    total = sum(loop.loss(amax, weight) for amax in amaxes)
    torch.autograd.grad(total, [weight])
    loop.loss(0.0, weight)


def inside_the_backward_pass(loop: Loop, amaxes: list[float]) -> None:
    for parameter in loop.model.parameters():
        optimizer = torch.optim.SGD([parameter], 1e-3)
        parameter.register_post_accumulate_grad_hook(lambda _p, optimizer=optimizer: optimizer.step())
    sum(loop.loss(amax) for amax in amaxes).backward()


@pytest.mark.parametrize(
    "loop", [by_an_optimizer, by_two_optimizers, by_hand, through_data, functionally, inside_the_backward_pass]
)
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_one_entry_a_step_however_weights_are_changed(loop: Any, micro_batches: int) -> None:
    made, expected = Loop(), []
    for step in (1.0, 2.0, 3.0):
        loop(made, [step * (1 + part) for part in range(micro_batches)])
        expected.insert(0, step * micro_batches)
        assert history(made.reduction) == expected


def test_another_models_optimizer_ends_no_step() -> None:
    first, second = Loop(), Loop()
    optimizer = torch.optim.SGD(second.model.parameters(), 1e-3)
    first.loss(1.0).backward()
    second.loss(2.0).backward()
    optimizer.step()
    assert history(first.reduction) == []
    assert history(second.reduction) == [2.0]


def test_frozen_weights_and_evaluations_end_no_step() -> None:
    loop = Loop()
    loop.model.requires_grad_(False)
    adapter = nn.Parameter(torch.ones(32))
    loop.model.adapter = adapter
    optimizer = torch.optim.SGD([adapter], 1e-3)
    for amax in (3.0, 1.0):
        (loop.loss(amax) * adapter.sum()).backward()
        with torch.no_grad():
            loop.loss(100.0)
    assert history(loop.reduction) == []
    optimizer.step()
    assert history(loop.reduction) == [3.0]


def test_a_skipped_step_goes_into_the_next_one_and_an_overflow_is_not_remembered() -> None:
    """As ``GradScaler`` does: gradients overflow, the optimizer is not called, the next step is taken."""
    loop = Loop()
    optimizer = torch.optim.SGD(loop.model.parameters(), 1e-3)
    loop.loss(1.0).backward()
    optimizer.step()
    optimizer.zero_grad()
    (loop.loss(2.0) * torch.inf).backward()
    optimizer.zero_grad()
    loop.loss(1.5).backward()
    optimizer.step()
    assert history(loop.reduction) == [2.0, 1.0]
    assert all(len(history(loop.reduction, slot)) == 2 for slot in range(3))


def test_a_model_put_under_a_policy_again_learns_once() -> None:
    """A policy's next phase keeps executions and makes a reduction anew; the one before may live on for a while."""
    loop = Loop()
    before, loop.reduction = loop.reduction, DelayedReduction(loop.model, [loop.run])
    before.groups = ["a group of ranks that is not asked any more"]
    optimizer = torch.optim.SGD(loop.model.parameters(), 1e-3)
    loop.loss(1.0).backward()
    optimizer.step()
    assert history(loop.reduction) == [1.0]


def _trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))
    Policy.model_validate({"default": "r", "recipes": {"r": DELAYED}}).apply(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.ones(8, 32)).square().mean().backward()
        optimizer.step()
    return model, optimizer


def _in_place(weight: nn.Parameter) -> None:
    with torch.no_grad():
        weight.mul_(4.0)


def _through_data(weight: nn.Parameter) -> None:
    weight.data.mul_(4.0)


@pytest.mark.parametrize("write", [_in_place, _through_data])
@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_a_copy_that_an_average_is_written_into_scales_by_what_it_sees(
    write: Callable[[nn.Parameter], None], again: bool, training: bool
) -> None:
    """Of the scales that it was made with, everything above them would saturate, without a word."""
    model, _ = _trained()
    average = copy.deepcopy(model).requires_grad_(False).train(training)
    x = torch.ones(8, 32)
    with torch.no_grad():
        assert torch.equal(average(x), model.eval()(x))
    for parameter in average.parameters():
        write(parameter)
    average = copy.deepcopy(average) if again else average
    fresh = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))
    fresh.load_state_dict(average.state_dict())
    Policy.model_validate({"default": "r", "recipes": {"r": DELAYED}}).apply(fresh)
    with torch.no_grad():
        assert torch.equal(average(x), fresh.eval()(x))


def _adapter(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """A merge of an adapter into a weight, as PEFT does it for evaluation."""
    model.get_parameter("0.weight").data += 0.5
    return x


def _other_inputs(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return 20 * x


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("change", [_adapter, _other_inputs])
@pytest.mark.parametrize("compiled", [False, True])
def test_evaluation_saturates_nothing(
    change: Callable[[nn.Module, torch.Tensor], torch.Tensor], compiled: bool
) -> None:
    """It may see what no training step has, and would be wrong by half of it without a word."""
    torch._dynamo.reset()
    model, _ = _trained()
    x = change(model, torch.linspace(-1, 1, 8 * 32).view(8, 32))
    run = torch.compile(model, backend="aot_eager") if compiled else model
    with torch.no_grad():
        found = run.eval()(x)
    remove_policy(model)
    plain = model(x)
    assert (found - plain).norm() < 0.1 * plain.norm()


def test_a_copy_that_is_trained_keeps_its_scales() -> None:
    model, optimizer = _trained()
    copied, its = copy.deepcopy((model, optimizer))
    for one, trains in ((model, optimizer), (copied, its)):
        one.zero_grad()
        one(torch.ones(8, 32)).square().mean().backward()
        trains.step()
    assert torch.equal(model.eval()(torch.ones(8, 32)), copied.eval()(torch.ones(8, 32)))
    before = copied(torch.full((8, 32), 9.0))
    assert torch.equal(before, model(torch.full((8, 32), 9.0)))
