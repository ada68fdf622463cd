"""The peak of a step, by torch's allocator."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from autoprec.trial.inside.observe.memory import StepPeak, is_out_of_memory, lasting

WIDTH, ROWS = 64, 512


def peak_of(model: nn.Module, optimizer: torch.optim.Optimizer, forward: Callable[[], torch.Tensor]) -> int:
    """Return the peak of the second of two steps."""
    peak = StepPeak()
    peak.begin(lasting(model, [optimizer]))
    for step in range(2):
        if step:
            peak.second_step()
        optimizer.zero_grad()
        forward().backward()
        optimizer.step()
    return peak.end()


def test_the_peak_is_of_the_second_step_with_the_optimizers_state() -> None:
    model = nn.Linear(WIDTH, WIDTH, bias=False)
    weights, result = 4 * WIDTH * WIDTH, 4 * ROWS * WIDTH
    x = torch.randn(ROWS, WIDTH)  # there before: the script's own
    plain = peak_of(model, torch.optim.SGD(model.parameters()), lambda: model(x).exp().sum())
    adam = peak_of(model, torch.optim.Adam(model.parameters()), lambda: model(x).exp().sum())
    # weights, and when backward begins the result, its exponential, and their gradients one after another
    assert weights + 2 * result <= plain <= weights + 4 * result + 4096
    assert adam == pytest.approx(plain + 2 * weights, abs=4096)  # two moments, made in the first step


def test_checkpointing_lowers_the_peak() -> None:
    layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), *[nn.Tanh()] * 3) for _ in range(4))

    def peak(*, again: bool) -> int:
        def forward() -> torch.Tensor:
            h = torch.randn(ROWS, WIDTH)
            for layer in layers:
                h = checkpoint(layer, h, use_reentrant=False) if again else layer(h)  # type: ignore[assignment]
            return h.sum()

        return peak_of(layers, torch.optim.SGD(layers.parameters()), forward)

    assert peak(again=True) < peak(again=False) / 1.5


def test_what_is_there_before_a_step_is_counted_once() -> None:
    model = nn.Linear(WIDTH, WIDTH, bias=False)
    tied = nn.Sequential(model, model)
    optimizer = torch.optim.Adam(tied.parameters())
    model(torch.ones(1, WIDTH)).sum().backward()
    optimizer.step()
    peak = StepPeak()
    peak.begin(lasting(tied, [optimizer]))
    peak.second_step()
    assert peak.end() == 4 * 4 * WIDTH * WIDTH + 4  # weights, gradients, two moments, and a count of steps


def test_a_script_that_profiles_itself_is_left_alone() -> None:
    peak = StepPeak()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as own:
        peak.begin([torch.ones(WIDTH)])
        torch.ones(WIDTH).exp()
        peak.second_step()
        assert peak.end() == 0
    assert any(event.key == "aten::exp" for event in own.key_averages())


def test_a_script_that_begins_to_profile_itself_gets_its_events() -> None:
    peak = StepPeak()
    peak.begin([torch.ones(WIDTH)])
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as own:
        torch.ones(WIDTH).exp()
        peak.second_step()
    assert peak.end() == 0
    assert any(event.key == "aten::exp" for event in own.key_averages())


@pytest.mark.parametrize(
    ("error", "oom"),
    [
        (MemoryError(), True),
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"), True),
        (RuntimeError("shape mismatch"), False),
    ],
)
def test_out_of_memory(error: BaseException, oom: bool) -> None:
    assert is_out_of_memory(error) is oom
