"""Operators are timed in the script's own steps; what the optimizer does is told apart."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from autoprec.graph.report import DATA, OPTIMIZER, OperatorTimes
from autoprec.trial.inside.observe.operator_times import OperatorTimer, operator_rows


def train(warmup: int, steps: int, *, total: int | None = None) -> tuple[OperatorTimes, int]:
    """Time a loop; return what was seen, and how many steps it took."""
    model = torch.nn.Linear(32, 32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    timer = OperatorTimer(torch.device("cpu"), warmup, steps)
    loop = SimpleNamespace(steps=0, total=warmup + 2 * steps if total is None else total)
    while loop.steps < loop.total:
        model(torch.randn(8, 32)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        loop.steps += 1
        timer.check(loop)  # type: ignore[arg-type]
    return timer.end(), loop.steps


def test_steps_are_timed_and_then_profiled() -> None:
    times, taken = train(2, 3)
    assert (times.steps, taken) == (3, 8)
    assert times.step_ms > 0
    calls = {(row.op, row.part): row.calls for row in times.operators}
    assert calls["aten::addmm", ""] == 1
    assert ("aten::add_", OPTIMIZER) in calls or ("aten::_foreach_add_", OPTIMIZER) in calls
    assert sum(row.ms for row in times.operators) <= times.profiled_ms * 1.2
    assert [row.ms for row in times.operators] == sorted((row.ms for row in times.operators), reverse=True)


def test_slow_steps_are_fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter(range(0, 10_000, 10))
    monkeypatch.setattr("autoprec.trial.inside.observe.operator_times.own_seconds", lambda _: next(seconds))
    times, taken = train(3, 5)
    assert (times.steps, taken) == (1, 4)
    assert times.step_ms == 10_000


def test_a_loaders_time_is_the_datas_and_a_share_of_the_clock_scales_it() -> None:
    def event(name: str, spent: float, parent: object = None) -> SimpleNamespace:
        return SimpleNamespace(name=name, self_cpu_time_total=spent, cpu_parent=parent)

    loader = event("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 1000.0)
    rows = operator_rows([loader, event("aten::stack", 500.0, loader), event("aten::mm", 4000.0)], 2, had=0.5)
    assert [(row.op, row.part, row.ms) for row in rows] == [
        ("aten::mm", "", 1.0),
        (loader.name, DATA, 0.25),
        ("aten::stack", DATA, 0.125),
    ]


def test_on_a_gpu_kernels_count_for_the_operator_that_launched_them() -> None:
    kinds = torch.profiler.DeviceType if hasattr(torch.profiler, "DeviceType") else torch.autograd.DeviceType
    launched = SimpleNamespace(name="aten::mm", self_device_time_total=3000.0, cpu_parent=None, device_type=kinds.CPU)
    kernel = SimpleNamespace(name="gemm_kernel", self_device_time_total=3000.0, cpu_parent=None, device_type=kinds.CUDA)
    assert [(row.op, row.ms) for row in operator_rows([launched, kernel], 1, on_gpu=True)] == [("aten::mm", 3.0)]


def test_the_step_in_which_profiling_ends_is_the_optimizers() -> None:
    """A trial ends in a hook of the last step, before torch has closed the step's range."""
    model = torch.nn.Linear(32, 32, bias=False)
    optimizers = torch.optim.Muon(model.parameters()), torch.optim.SGD([torch.nn.Parameter(torch.zeros(3))])
    timer = OperatorTimer(torch.device("cpu"), 2, 2)
    loop = SimpleNamespace(steps=0, total=6)
    found: list[OperatorTimes] = []

    def stepped(*_: object) -> None:
        loop.steps += 1
        timer.check(loop)  # type: ignore[arg-type]
        if loop.steps == loop.total:
            found.append(timer.end())

    optimizers[0].register_step_post_hook(stepped)
    while not found:
        model(torch.randn(8, 32)).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
    calls = {(row.op, row.part): row.calls for row in found[0].operators}
    assert calls["aten::addmm", OPTIMIZER] == 10
    assert calls["aten::mm", OPTIMIZER] == 5
    assert calls["aten::mm", ""] == 2
    assert ("aten::addmm", "") not in calls
