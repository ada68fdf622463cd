"""Without a GPU: timing is of the device, and what fails is told."""

from __future__ import annotations

import pytest
import torch

from autoprec.cost.calibrate.cuda_bench import CudaBench


class Event:
    """A device event on a clock that runs 2 ms per pair."""

    def __init__(self, enable_timing: bool = False) -> None:
        pass

    def record(self) -> None:
        pass

    def elapsed_time(self, _other: Event) -> float:
        return 2.0


@pytest.fixture
def slept() -> list[int]:
    return []


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, slept: list[int]) -> CudaBench:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _device=None: None)
    monkeypatch.setattr(torch.cuda, "_sleep", slept.append)
    return CudaBench("cpu", repeats=2)


def test_twenty_calls_lie_between_two_events_behind_a_sleep(bench: CudaBench, slept: list[int]) -> None:
    calls: list[str] = []
    runs = [lambda: calls.append("a"), lambda: calls.append("b")]
    assert bench._time(runs) == pytest.approx(2e-3 / 20)
    assert len(calls) == 2 + 3 + 2 * 20
    assert calls[-20:].count("a") == 10  # they take turns
    assert len(slept) == 2
    assert min(slept) > 20 * 50_000  # longer than launching 20 calls takes


def test_copies_and_launches_are_measured(bench: CudaBench) -> None:
    assert bench.copy(1024) is not None
    assert bench.launch() == pytest.approx(2e-3 / 20)
    host = bench.host()
    assert host is not None
    assert 1e-7 < host < 1e-2
    bench.warm(0.01, side=16)
    assert bench.versions()["torch"] == torch.__version__


def test_a_kernel_that_fails_raises_and_is_not_swallowed(bench: CudaBench) -> None:
    def broken() -> None:
        raise RuntimeError("no kernel image is available")

    with pytest.raises(RuntimeError, match="no kernel image"):
        bench._time([broken])


@pytest.mark.gpu
def test_a_real_device_is_measured() -> None:
    assert 1e-7 < CudaBench().launch() < 1e-2
