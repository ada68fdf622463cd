"""Without a GPU: what is not supported fails alone, timing is of the device, and operands do not stay in the cache."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from autoprec.backends import scaled_mm
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
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: SimpleNamespace(L2_cache_size=4096))
    return CudaBench("cpu", repeats=2)


def test_twenty_calls_lie_between_two_events_behind_a_sleep(bench: CudaBench, slept: list[int]) -> None:
    calls: list[str] = []
    runs = [lambda: calls.append("a"), lambda: calls.append("b")]
    assert bench._time(runs) == pytest.approx(2e-3 / 20)
    assert len(calls) == 2 + 3 + 2 * 20
    assert calls[-20:].count("a") == 10  # they take turns
    assert len(slept) == 2
    assert min(slept) > 20 * 50_000  # longer than launching 20 calls takes


def test_small_operands_are_many_and_large_ones_one(bench: CudaBench) -> None:
    assert bench._sets(1 << 20) == 1
    assert bench._sets(1024) * 1024 >= 3 * 4096
    assert bench._sets(1) == 64


def test_plain_gemms_copies_and_launches_are_measured(bench: CudaBench) -> None:
    assert bench.gemm("bf16", 16, 16, 16) is not None
    assert bench.gemm("fp32", 16, 16, 16) is not None
    assert bench.copy(1024) is not None
    assert bench.launch() == pytest.approx(2e-3 / 20)
    host = bench.host()
    assert host is not None
    assert 1e-7 < host < 1e-2
    bench.warm(0.01, side=16)
    assert bench.versions()["torch"] == torch.__version__


def test_fp32_is_measured_without_tf32_and_the_setting_comes_back(
    bench: CudaBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    monkeypatch.setattr(bench, "_time", lambda _runs: seen.append(torch.get_float32_matmul_precision()))
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        bench.gemm("fp32", 16, 16, 16)
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(before)
    assert seen == ["highest"]


@pytest.mark.parametrize("family", ["fp8_tensor", "fp8_row"])
def test_scaled_gemms_go_through_torch_in_hoppers_layout(
    bench: CudaBench, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if family == "fp8_row" and not scaled_mm._ROWS_ON_CPU:
        pytest.skip("the CPU's kernel of this torch, which stands in for a GPU's, has tensor scales alone")
    real, seen = torch._scaled_mm, []

    def product(left: torch.Tensor, right: torch.Tensor, **settings: Any) -> torch.Tensor:
        seen.append((left.stride(), right.stride(), settings["scale_a"].shape, settings["scale_b"].shape))
        assert settings["scale_a"].dtype == torch.float32
        return real(left, right, **settings)

    monkeypatch.setattr(torch, "_scaled_mm", product)
    assert bench.gemm(family, 32, 48, 64) is not None
    left, right, scale_a, scale_b = seen[0]
    assert (left, right) == ((48, 1), (1, 48))
    assert (tuple(scale_a), tuple(scale_b)) == (((32, 1), (1, 64)) if family == "fp8_row" else ((), ()))


@pytest.mark.parametrize("family", ["mxfp8", "nvfp4", "fp8_delayed", "fp8_block"])
def test_what_has_no_kernel_here_is_left_out(bench: CudaBench, family: str) -> None:
    assert bench.gemm(family, 16, 16, 16) is None
    assert bench.cast(family, 16, 16) is None


def test_casts_are_compiled_per_shape_and_write_both_layouts(bench: CudaBench, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[torch.Tensor]] = []
    settings: list[dict[str, Any]] = []
    resets: list[int] = []

    def compiled(run: Any, **options: Any) -> Any:
        settings.append(options)

        def call(x: torch.Tensor) -> list[torch.Tensor]:
            seen.append(run(x))
            return seen[-1]

        return call

    monkeypatch.setattr(torch, "compile", compiled)
    monkeypatch.setattr(torch.compiler, "reset", lambda: resets.append(1))
    for family in ("fp8_row", "fp8_tensor"):
        assert bench.cast(family, 32, 64) is not None
        assert [tuple(made.shape) for made in seen[-1]] == [(32, 64), (64, 32)]
        assert all(made.is_contiguous() for made in seen[-1])
    assert settings == [{"dynamic": False}] * 2
    assert len(resets) == 2


def test_a_kernel_that_fails_raises_and_is_not_swallowed(bench: CudaBench) -> None:
    def broken() -> None:
        raise RuntimeError("no kernel image is available")

    with pytest.raises(RuntimeError, match="no kernel image"):
        bench._time([broken])


@pytest.mark.gpu
def test_a_real_device_is_measured() -> None:
    found = CudaBench().gemm("bf16", 1024, 1024, 1024)
    assert found is not None
    assert 1e-6 < found < 1e-2
