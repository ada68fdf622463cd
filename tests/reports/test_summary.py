"""What a gain is told against, and which figure a policy gets."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autoprec.reports.summary import summarise
from autoprec.reports.text import cost_text
from autoprec.tuning.study.records import SearchResult
from autoprec.tuning.study.run import Run, metrics_of
from tests.reports.conftest import rehearsal


def test_payback_is_seconds_over_saved_share(result: SearchResult, records: list[Run]) -> None:
    summary = summarise(result, records)
    assert summary.saved_share == pytest.approx(0.6)
    assert summary.break_even_s == pytest.approx(150.0)


def test_a_figure_of_the_result_is_preferred_to_our_own() -> None:
    result, records = rehearsal()
    told = replace(result, best={**result.best, "speedup_over_16bit": 1.25})
    assert summarise(told, records).rows[0]["speedup_over_16bit"] == 1.25


def test_a_policy_has_one_divergence_wherever_it_is_shown() -> None:
    result, records = rehearsal()
    summary = summarise(result, records)
    shown = {row["divergence"] for row in summary.rows if row["name"] in ("the policy", "all fp8_rowwise")}
    shown |= {point["divergence"] for point in summary.points if point.name == "all fp8_rowwise"}
    assert {round(value, 12) for value in shown} == {5e-4}
    assert [point.name for point in summary.points].count("all fp8_rowwise") == 1


def test_the_front_is_that_of_the_points_shown() -> None:
    result, records = rehearsal()
    assert summarise(result, records).front == {"all bf16", "all fp8_rowwise", "all fp8_delayed"}
    worse = replace(records[3], metrics=records[3].metrics | metrics_of({"step_time_ms": 700.0}, "modelled"))
    assert "all fp8_delayed" not in summarise(result, [*records[:3], worse, *records[4:]]).front


def test_modelled_times_give_no_payback(result: SearchResult, records: list[Run]) -> None:
    modelled = replace(result, best={**result.best, "sources": {"step_time_ms": "modelled"}})
    assert summarise(modelled, records).break_even_s is None


def test_a_verdict_from_the_cost_model_alone_shows_no_candidate(modelled_stay: SearchResult) -> None:
    assert [row["role"] for row in summarise(modelled_stay, []).rows] == ["reference"]


def test_on_a_gpu_the_gain_over_the_16bit_run_comes_first() -> None:
    result, records = rehearsal()
    summary = summarise(result, records)
    assert summary.baseline is not None
    assert summary.baseline["name"] == "all bf16"
    assert summary.rows[0]["speedup_over_16bit"] == pytest.approx(874 / 668)
    assert summarise(replace(result, baseline=""), records).baseline is None


def test_the_noise_band_is_as_wide_as_the_noise_run_at_each_step(result: SearchResult, records: list[Run]) -> None:
    band = summarise(result, records).noise
    assert len(band) == 10
    assert all(high == pytest.approx(1e-3) and low == -high for low, high in band)


def test_failures_tell_how_they_ended(result: SearchResult, records: list[Run]) -> None:
    assert summarise(result, records).failures == (("trial 7", "diverged: loss is NaN"),)


def test_what_is_saved_is_told_against_the_16_bit_run() -> None:
    """A policy at 1.5x over 16 bit was said to save 94 % of a training run: of one in fp32."""
    result, records = rehearsal()
    best = {**result.best, "speedup": 15.0, "effective_speedup": 15.0, "speedup_over_16bit": 1.5}
    told = replace(result, best=best)
    summary = summarise(told, records)
    assert summary.saved_share == pytest.approx(1 / 3)
    assert "of the time of a training run in 16 bit" in cost_text(summary)
