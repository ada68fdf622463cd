"""Timing whole linears: on the CPU for real, at sizes of no interest; crashes and late processes by stand-ins."""

from __future__ import annotations

import fcntl
import functools
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from autoprec.cost.calibrate import cuda_bench, linear_bench
from autoprec.cost.calibrate.linear_bench import plan, time_linear, time_linears
from autoprec.cost.calibrate.linears import LINEAR_SHAPES, Linear
from autoprec.precision.hardware import TARGETS

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch, where Inductor is imported

CPU = torch.device("cpu")
TINY = (64, 64, 32)


def test_the_plan_has_what_the_target_runs_every_recipe_at_one_size_first() -> None:
    native = plan(TARGETS["h100"], "native", "compiled")
    assert {row.recipe for row in native} == {"bf16", "fp8_rowwise", "fp8_tensorwise", "fp8_delayed", "fp8_block"}
    assert len(native) == 5 * len(LINEAR_SHAPES)
    assert {row.how for row in native} == {"compiled"}
    assert {row.shape for row in native[:5]} == {LINEAR_SHAPES[0]}
    assert native[0].recipe == "bf16"  # without which the others correct nothing
    assert "bf16" not in {row.recipe for row in plan(TARGETS["h100"], "torchao", "eager")}
    assert {"mxfp8", "nvfp4"} <= {row.recipe for row in plan(TARGETS["b200"], "native", "eager")}


@pytest.mark.parametrize(("backend", "how"), [("native", "eager"), ("torchao", "eager"), ("torchao", "compiled")])
def test_a_linear_is_timed_through_the_policy_and_compared_with_bf16(
    backend: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiled: into graphs, without the seconds that a CPU's code for them takes."""
    graphs = functools.partialmethod(torch.nn.Module.compile, backend="aot_eager")
    monkeypatch.setattr(torch.nn.Module, "compile", graphs)
    if backend == "torchao":
        pytest.importorskip("torchao")
    found = time_linear(Linear("fp8_tensorwise", backend, how, TINY), CPU)
    assert not found.failed
    assert found.seconds > 0
    assert 0.005 < found.error < 0.1  # of FP8, neither nothing nor nonsense


def test_bf16_is_bf16() -> None:
    assert time_linear(Linear("bf16", "native", "eager", TINY), CPU).error < 0.005


def test_a_recipe_that_a_backend_lacks_says_why_and_the_rest_goes_on() -> None:
    asked = [Linear("fp8_block", "native", "eager", TINY), Linear("bf16", "native", "eager", TINY)]
    refused, timed = linear_bench._filled(asked, CPU)
    assert "native cannot run fprop as fp8 block" in refused.failed
    assert timed.seconds > 0


def test_a_kernel_that_computes_nonsense_has_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = linear_bench._in_bf16
    monkeypatch.setattr(linear_bench, "_in_bf16", lambda *given: tuple(-value for value in exact(*given)))
    found = time_linear(Linear("bf16", "native", "eager", TINY), CPU)
    assert not found.seconds
    assert "away from bf16's: wrong" in found.failed


def test_an_error_of_the_device_ends_the_process_and_another_one_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_row: Linear, _device: torch.device, _alone: Any) -> Linear:
        raise RuntimeError(said)

    monkeypatch.setattr(linear_bench, "time_linear", fail)
    said = "no kernel\nand a trace"
    (row,) = linear_bench._filled([Linear("bf16", "native", "eager", TINY)], CPU)
    assert row.failed == "RuntimeError: no kernel"
    said = "CUDA error: an illegal memory access was encountered"
    with pytest.raises(RuntimeError, match="illegal memory"):
        list(linear_bench._filled([Linear("bf16", "native", "eager", TINY)], CPU))


def test_a_process_of_its_own_fills_in_the_rows_and_is_ended_when_it_is_late(tmp_path: Path) -> None:
    turns = tmp_path / "turns"
    asked = [Linear("bf16", "native", "eager", TINY), Linear("fp8_block", "native", "eager", TINY)]
    found, how = linear_bench._process(asked, "cpu", 120.0, turns)
    assert how == ""
    assert found[0].seconds > 0
    assert found[1].failed
    assert linear_bench._process(asked, "cpu", 0.05, turns) == ([], "late")
    found, how = linear_bench._process(asked, "no such device", 120.0, turns)
    assert found == []
    assert "ended with status 1: RuntimeError" in how


def test_who_is_timed_waits_for_its_turn_with_the_device(tmp_path: Path) -> None:
    turns = tmp_path / "turns"
    with turns.open("a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert linear_bench._process([Linear("bf16", "native", "eager", TINY)], "cpu", 15.0, turns) == ([], "late")


def test_the_device_and_the_host_are_timed_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[int] = []
    event = SimpleNamespace(record=lambda: None, elapsed_time=lambda _other: 15.0)
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: event)
    monkeypatch.setattr(torch.cuda, "_sleep", slept.append)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _device: None)
    now = [0.0]
    monkeypatch.setattr(cuda_bench, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    def step() -> None:
        now[0] += 1e-3

    device_s, host_s = linear_bench._apart(step, CPU, 2e-3)
    assert device_s == pytest.approx(3e-3)  # five steps lie between two events
    assert host_s == pytest.approx(1e-3)
    assert min(slept) > 1.98e9 * 5 * 2e-3  # at an H100's clock, longer than five steps are launched


class Processes:
    """Processes that time everything but crash in what ``crash`` names, or are late."""

    def __init__(self, crash: str = "", late_after: int = 1000) -> None:
        self.crash, self.late_after, self.calls = crash, late_after, 0

    def __call__(self, rows: list[Linear], _device: str, _limit_s: float, _turns: Path) -> tuple[list[Linear], str]:
        self.calls += 1
        done: list[Linear] = []
        for row in rows:
            if len(done) == self.late_after:
                return done, "late"
            if row.recipe == self.crash:
                return done, "its process ended with status -11: "
            done.append(replace(row, seconds=1e-3))
        return done, ""


def of_backend(monkeypatch: pytest.MonkeyPatch, processes: Processes) -> tuple[list[Linear], list[str]]:
    monkeypatch.setattr(linear_bench, "_process", processes)
    lines: list[str] = []
    rows = plan(TARGETS["h100"], "native", "eager")
    return linear_bench._of_backend(rows, "cpu", 100.0, lines.append, Path("turns")), lines


def test_a_crash_costs_its_recipe_in_that_mode_and_the_rest_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    processes = Processes(crash="fp8_delayed")
    found, lines = of_backend(monkeypatch, processes)
    assert processes.calls == 2  # after the crash another one, for other recipes
    assert {row.recipe for row in found if row.failed} == {"fp8_delayed"}
    assert len([row for row in found if row.seconds]) == 4 * 2
    assert lines.count("linear fp8_delayed by native, eager: its process ended with status -11: ") == 1


def test_what_is_late_is_left_out_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    found, lines = of_backend(monkeypatch, Processes(late_after=3))
    assert len(found) == 3
    assert not any(row.failed for row in found)
    assert "linears by native, eager: stopped after 100 s, 7 were not timed" in lines


def test_every_backend_that_is_here_is_timed_eager_and_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str, float]] = []

    def of(rows: list[Linear], _device: str, limit_s: float, _say: Any, _turns: Path) -> list[Linear]:
        asked.append((rows[0].backend, rows[0].how, limit_s))
        return rows[:1]

    monkeypatch.setattr(linear_bench, "_of_backend", of)
    lines: list[str] = []
    found = time_linears(TARGETS["h100"], lines.append, device="cpu", limit_s=60.0)
    assert {(row.backend, row.how) for row in found} == {(name, how) for name, how, _ in asked}
    assert {("native", "eager", 60.0), ("native", "compiled", 60.0)} <= set(asked)
    assert any("linears by transformer_engine: left out: Transformer Engine needs CUDA" in line for line in lines)
