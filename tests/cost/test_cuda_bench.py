"""Without a GPU: what is not supported is left out instead of failing the calibration; with one, real figures."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autoprec.cost.cuda_bench import CudaBench


class Event:
    """A device event on a clock that runs 2 ms per pair."""

    def __init__(self, enable_timing: bool = False) -> None:
        pass

    def record(self) -> None:
        pass

    def elapsed_time(self, _other: Event) -> float:
        return 2.0


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> CudaBench:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _device=None: None)
    return CudaBench("cpu", repeats=2)


def test_ten_calls_lie_between_two_events(bench: CudaBench) -> None:
    calls: list[int] = []
    assert bench._time(lambda: calls.append(1)) == pytest.approx(2e-3 / 10)
    assert len(calls) == 3 + 2 * 10


def test_plain_gemms_copies_and_launches_are_measured(bench: CudaBench) -> None:
    assert bench.gemm("bf16", 16, 16, 16) is not None
    assert bench.gemm("fp32", 16, 16, 16) is not None
    assert bench.copy(1024) is not None
    launch = bench.launch()
    assert launch == pytest.approx(2e-3 / 10 / 100)
    assert bench.versions()["torch"] == torch.__version__


@pytest.mark.parametrize("family", ["fp8_tensor", "fp8_row"])
def test_scaled_gemms_go_through_torch(bench: CudaBench, family: str) -> None:
    assert bench.gemm(family, 32, 32, 32) is not None


@pytest.mark.parametrize("family", ["mxfp8", "nvfp4", "fp8_delayed", "fp8_block"])
def test_what_has_no_kernel_here_is_left_out(bench: CudaBench, family: str) -> None:
    assert bench.gemm(family, 16, 16, 16) is None
    assert bench.cast(family, 16, 16) is None


def test_casts_are_compiled_and_quantise_both_uses(bench: CudaBench, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[torch.Tensor]] = []

    def compiled(run: Any) -> Any:
        def call(x: torch.Tensor) -> list[torch.Tensor]:
            seen.append(run(x))
            return seen[-1]

        return call

    monkeypatch.setattr(torch, "compile", compiled)
    assert bench.cast("fp8_row", 32, 64) is not None
    assert len(seen[0]) == 2
    assert bench.cast("fp8_tensor", 32, 64) is not None
    assert seen[-1][1].shape == (64, 32)  # the transposed copy


def test_a_kernel_that_fails_is_no_measurement(bench: CudaBench) -> None:
    def broken() -> None:
        raise RuntimeError("no kernel image is available")

    assert bench._time(broken) is None


@pytest.mark.gpu
def test_a_real_device_is_measured() -> None:
    found = CudaBench().gemm("bf16", 1024, 1024, 1024)
    assert found is not None
    assert 1e-6 < found < 1e-2
