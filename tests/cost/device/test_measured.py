"""Measured rows of GPUs: what is shipped, and how a rehearsal on such a target uses them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autoprec.backends import BACKENDS
from autoprec.cost import CostModel, CostScale, model
from autoprec.cost.device.measured import Measured, _table, measured_on, modelled
from autoprec.cost.rates import default_rates
from autoprec.graph.report import GraphReport
from autoprec.policy.schema import LayerPlan
from autoprec.precision.hardware import TARGETS
from autoprec.precision.recipes import BUILTIN_RECIPES as R

H100 = TARGETS["h100"]
SHAPE = (8192, 4096, 16384)


def measured(*rows: tuple[str, str, str, float], **rates: float) -> Measured:
    return Measured(device="D", date="2026-01-02", source="a test", rates=rates, shape=SHAPE, linears=rows)


def known(monkeypatch: pytest.MonkeyPatch, found: Measured | None) -> None:
    monkeypatch.setattr(model, "measured_on", lambda _target: found)


def test_what_is_shipped_is_of_known_targets_with_a_date_and_a_source_that_is_there() -> None:
    root = Path(__file__).resolve().parents[3]
    for name, found in _table().items():
        assert name in TARGETS
        assert (root / found.source.split(";")[0]).is_file()
        assert found.rates.keys() <= {"bandwidth", "launch_us", "host_us"}
        assert 0 < found.rates.get("bandwidth", 1.0) <= 1
        for row in found.rows:
            assert row.recipe in R
            assert row.backend in BACKENDS
            assert row.how in ("eager", "compiled")
            assert row.seconds > 0


def test_a_rehearsal_of_a_measured_target_says_so_and_others_stay_uncalibrated(large: GraphReport) -> None:
    assert CostModel(large, H100).label == "modelled, calibrated on NVIDIA H100 80GB HBM3 (2026-11-27), compiled"
    assert CostModel(large, TARGETS["h200"]).label == "modelled, uncalibrated, compiled"
    assert measured_on(replace(H100, bandwidth=1e12)) is None  # a user's own target of that name
    given = CostModel(large, H100, rates=default_rates(H100))
    assert given.label == "modelled, uncalibrated, compiled"


def test_rows_of_the_h100_are_within_the_stated_error_of_the_model() -> None:
    found = measured_on(H100)
    assert found is not None
    for how, backend in (("eager", "native"), ("compiled", "torchao"), ("compiled", "transformer_engine")):
        factors = found.factors(H100, found.over(default_rates(H100)), how, backend)
        assert {"bf16", "fp8_tensor"} <= set(factors)
        assert all(0.75 < factor < 1.3 for factor in factors.values()), (how, backend, factors)


def test_measured_rates_change_figures(large: GraphReport, monkeypatch: pytest.MonkeyPatch) -> None:
    known(monkeypatch, measured(bandwidth=0.4))
    slow = CostModel(large, H100).estimate({})
    known(monkeypatch, None)
    plain = CostModel(large, H100).estimate({})
    assert slow.breakdown["norm"] == pytest.approx(2 * plain.breakdown["norm"], rel=0.02)
    assert slow.label == "modelled, calibrated on D (2026-01-02), compiled"


def plans() -> dict[str, LayerPlan]:
    found = {name: LayerPlan.uniform(R[name]) for name in ("bf16", "fp32", "fp8_rowwise", "fp8_block")}
    return found | {"mixed": LayerPlan(fprop=R["fp8_rowwise"], dgrad=R["fp8_rowwise"], wgrad=R["bf16"])}


def test_layers_are_charged_as_their_backend_ran_a_linear(large: GraphReport, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [("bf16", "native", "compiled", 5e3), ("fp8_rowwise", "native", "compiled", 8e3)]
    rows += [("fp8_rowwise", "torchao", "compiled", 4e3)]
    known(monkeypatch, measured(*rows))
    native, torchao = (CostModel(large, H100, backend=name) for name in ("auto", "torchao"))
    known(monkeypatch, None)
    plain = CostModel(large, H100)
    times: dict[str, dict[str, float]] = {
        name: {key: cost.layer_time_ms("lm_head", plan) for key, plan in plans().items()}
        for name, cost in (("native", native), ("torchao", torchao), ("plain", plain))
    }
    assert times["native"]["fp8_rowwise"] == pytest.approx(2 * times["torchao"]["fp8_rowwise"])
    assert times["native"]["bf16"] == times["torchao"]["bf16"]
    factors = {key: times["native"][key] / times["plain"][key] for key in plans()}
    # what was not timed is charged like bf16, and a mixture as the mean of its GEMMs
    assert factors["fp8_block"] == pytest.approx(factors["bf16"])
    assert factors["mixed"] == pytest.approx((2 * factors["fp8_rowwise"] + factors["bf16"]) / 3)
    assert factors["fp32"] == 1.0
    eager = native.executed("eager").layer_time_ms("lm_head", plans()["bf16"])
    assert eager == plain.executed("eager").layer_time_ms("lm_head", plans()["bf16"])  # only compiled was timed
    wide = native.at(CostScale(width=2.0)).layer_time_ms("lm_head", plans()["fp8_rowwise"])
    plainly = plain.at(CostScale(width=2.0)).layer_time_ms("lm_head", plans()["fp8_rowwise"])
    assert wide == pytest.approx(factors["fp8_rowwise"] * plainly)


def test_without_a_timed_bf16_linear_nothing_is_corrected() -> None:
    assert measured(("fp8_rowwise", "native", "compiled", 4e3)).factors(H100, default_rates(H100), "compiled") == {}


def test_a_factor_is_the_measured_time_over_the_modelled() -> None:
    rates = default_rates(H100)
    found = measured(("bf16", "native", "compiled", 10e3))
    factors = found.factors(H100, rates, "compiled")
    assert factors == {"bf16": pytest.approx(10e-3 / modelled(H100, rates, found.rows[0]).seconds)}


@pytest.mark.parametrize("kind", ["conv", "rnn", "grouped"])
def test_timed_linears_say_nothing_of_convolutions_and_recurrent_layers(
    tiny: GraphReport, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    change: dict[str, Any] = {"flags": ("grouped",)} if kind == "grouped" else {"kind": kind}
    report = replace(tiny, layers=tuple(replace(layer, **change) for layer in tiny.layers))
    name, plan = report.layers[0].name, LayerPlan.uniform(R["bf16"])
    known(monkeypatch, None)
    plain, alone = (CostModel(one, H100).layer_time_ms(name, plan) for one in (report, tiny))
    known(monkeypatch, measured(("bf16", "native", "compiled", 50e3)))
    assert CostModel(report, H100).layer_time_ms(name, plan) == plain
    assert CostModel(tiny, H100).layer_time_ms(name, plan) > alone
