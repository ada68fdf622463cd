from __future__ import annotations

import subprocess
from typing import Any

import pytest

from autoprec.cost import CostModel
from autoprec.cost.device import cpu
from autoprec.cost.device.cpu import (
    BANDWIDTH,
    FORMATS,
    UNCALIBRATED,
    UNMEASURED,
    cpu_model,
    cpu_rates,
    measure,
    on_this_cpu,
)
from autoprec.graph.report import GraphReport
from autoprec.policy.schema import LayerPlan
from autoprec.precision.hardware import FAMILIES, TARGETS
from autoprec.precision.recipes import BUILTIN_RECIPES

CPU = TARGETS["cpu"]
FAST = {"fp32": 100e9, "bf16": 400e9, "int8": 600e9}
#: Measures anew; the rates that other tests of this process have measured are kept.
measured_anew = cpu_rates.__wrapped__


def test_three_products_are_timed_here() -> None:
    found = measure()
    assert set(found) == set(FORMATS)
    assert all(1e8 < rate < 1e14 for rate in found.values())
    assert cpu_model()


def test_a_child_times_them_and_the_label_says_what_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    said = '{"fp32": 1e11, "bf16": 4e11, "int8": 6e11}\n'
    asked: dict[str, Any] = {}

    def run(command: list[str], **how: Any) -> subprocess.CompletedProcess[str]:
        asked.update(how, command=command)
        return subprocess.CompletedProcess(command, 0, "a warning\n" + said, "")

    monkeypatch.setenv("AUTOPREC_TRIAL", "x")
    monkeypatch.setattr(cpu.subprocess, "run", run)
    rates, label = measured_anew()
    assert rates == FAST
    assert (
        label == "modelled roughly, from three products timed on this CPU ("
        "fp32 100, bf16 400, int8 600 GFLOP/s on one thread)"
    )
    assert asked["env"]["OMP_NUM_THREADS"] == "1"
    assert "AUTOPREC_TRIAL" not in asked["env"]  # a child of a search must not take itself for a trial


@pytest.mark.parametrize("out", ["", "not json", "[]", '{"fp32": 1e11}', '{"fp32": null, "bf16": 1, "int8": 1}'])
def test_where_none_can_be_timed_the_figures_are_called_uncalibrated(monkeypatch: pytest.MonkeyPatch, out: str) -> None:
    monkeypatch.setattr(cpu.subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], 0, out, ""))
    assert measured_anew() == (UNMEASURED, UNCALIBRATED)


def test_a_child_that_ends_badly_is_survived(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*_: Any, **__: Any) -> Any:
        raise subprocess.TimeoutExpired("python", 1.0)

    monkeypatch.setattr(cpu.subprocess, "run", run)
    assert measured_anew() == (UNMEASURED, UNCALIBRATED)


def test_every_family_is_multiplied_and_none_that_is_emulated_beats_bf16() -> None:
    device = on_this_cpu(CPU, FAST)
    assert device.bandwidth == BANDWIDTH
    assert all(device.peak(family) for family in FAMILIES)
    assert device.peak("int8") == pytest.approx(600e9)
    assert all(device.peak(family) <= device.peak("bf16") for family in FAMILIES if family != "int8")


@pytest.mark.parametrize(
    ("rates", "fastest"),
    [
        (FAST, "int8"),
        ({"fp32": 100e9, "bf16": 800e9, "int8": 400e9}, "bf16"),
        ({"fp32": 100e9, "bf16": 20e9, "int8": 90e9}, "fp32"),
        ({"fp32": 60e9, "bf16": 40e9, "int8": 400e9}, "int8"),
        ({"fp32": 60e9, "bf16": 200e9, "int8": 60e9}, "bf16"),
    ],
)
def test_the_measured_rates_order_large_layers(large: GraphReport, rates: dict[str, float], fastest: str) -> None:
    model = CostModel(large, CPU, cpu=rates)
    name = "model.layers.0.mlp.up_proj"
    times = {
        recipe: model.layer_time_ms(name, LayerPlan.uniform(BUILTIN_RECIPES[recipe]))
        for recipe in ("fp32", "bf16", "int8", "fp8_rowwise", "nvfp4")
    }
    assert min(times, key=lambda recipe: times[recipe]) == fastest
    assert min(times["fp8_rowwise"], times["nvfp4"]) > times["bf16"]


def test_its_bounds_say_how_rough_they_are(tiny: GraphReport) -> None:
    step = CostModel(tiny, CPU, cpu=FAST).estimate({})
    assert 0.35 <= step.spread <= 0.6
    assert step.low_ms < 0.65 * step.time_ms < 1.35 * step.time_ms < step.high_ms
