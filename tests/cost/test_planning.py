from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from autoprec.cost import CostModel, CostScale
from autoprec.cost.planning import USABLE_MEMORY, at_the_limit, break_even_tokens, payback, sweep
from autoprec.cost.transformer import PRESETS, DecoderConfig, decoder_report
from autoprec.graph.report import GraphReport
from autoprec.precision.hardware import TARGETS

Uniform = Callable[..., Any]
H100 = TARGETS["h100"]


@pytest.fixture(scope="module")
def medium() -> GraphReport:
    return decoder_report(DecoderConfig(2048, 4, 16, 8192, 32000), batch=1, seq=512)


def test_fp8_pays_from_some_batch_size_on(medium: GraphReport, uniform: Uniform) -> None:
    points = sweep(CostModel(medium, H100), uniform(medium), (0.125, 0.5, 2, 8, 32))
    assert [p.tokens for p in points] == [64, 256, 1024, 4096, 16384]
    gains = [p.bound_speedup for p in points]
    assert gains == sorted(gains)
    assert points[-1].bound_speedup > 1.25
    found = break_even_tokens(points, threshold=0.2)
    assert found is not None
    assert 64 < found <= 16384


def test_longer_sequences_dilute_the_gain(medium: GraphReport, uniform: Uniform) -> None:
    model = CostModel(medium, H100, scale=CostScale(tokens=32))
    batches = sweep(model, uniform(medium), (1, 64))
    sequences = sweep(model, uniform(medium), (1, 64), sequence=True)
    assert batches[0] == sequences[0]
    assert sequences[1].bound_speedup < batches[1].bound_speedup
    assert sequences[1].step_ms > batches[1].step_ms


def test_a_sweep_says_what_no_longer_fits(uniform: Uniform) -> None:
    report = decoder_report(PRESETS["gpt2"], batch=8, seq=1024)
    small, big = sweep(CostModel(report, H100), uniform(report), (1, 32))
    assert small.fits
    assert not big.fits
    assert big.memory_bytes > H100.memory_bytes > small.memory_bytes > 0
    assert [p.kind for p in sweep(CostModel(report, H100), uniform(report), (1, 32), threshold=9.0)] == ["stay"] * 2


def test_no_break_even_where_nothing_gains(tiny: GraphReport, uniform: Uniform) -> None:
    points = sweep(CostModel(tiny, H100), uniform(tiny), (0.5, 1))
    assert break_even_tokens(points) is None
    assert points[0].to_json()["kind"] == "stay"


def test_payback_counts_what_the_search_costs() -> None:
    found = payback(100.0, 1.25)
    assert found.search_s > 60
    assert found.saved_ms_per_step == pytest.approx(20.0)
    assert found.steps == pytest.approx(found.search_s / 0.02)
    assert found.hours == pytest.approx(found.steps * 0.08 / 3600)
    assert payback(100.0, 1.000003).to_json()["steps"] is None, "nobody trains for 100 million steps"
    never = payback(100.0, 1.0)
    assert never.steps == float("inf")
    assert never.to_json()["steps"] is None
    assert payback(100.0, 1.25, 1.0).steps == float("inf")  # the script as written is that much faster than bf16
    assert payback(100.0, 1.25, 2.0) == found
    assert payback(100.0, 1.25, 1.1).saved_ms_per_step == pytest.approx(8.0)


def test_the_largest_micro_batch_fits_and_the_next_does_not(medium: GraphReport, uniform: Uniform) -> None:
    choices = {"keep": {}, **uniform(medium)}
    limits = at_the_limit(CostModel(medium, H100), choices)
    assert [limit.tokens_per_s for limit in limits] == sorted((x.tokens_per_s for x in limits), reverse=True)
    room = USABLE_MEMORY * H100.memory_bytes
    for limit in limits:
        sizes = []
        for samples in (limit.samples, limit.samples + 1):
            report = decoder_report(DecoderConfig(2048, 4, 16, 8192, 32000), batch=samples, seq=512)
            sizes.append(CostModel(report, H100).estimate(choices[limit.choice]))
        assert sizes[0].memory_bytes <= room < sizes[1].memory_bytes
        assert limit.memory_bytes == pytest.approx(sizes[0].memory_bytes, rel=0.002)
        assert limit.tokens_per_s == pytest.approx(limit.samples * 512 / sizes[0].time_ms * 1e3, rel=0.01)
    by_name = {limit.choice: limit.samples for limit in limits}
    assert by_name["fp8_tensorwise"] > by_name["keep"]


def test_no_limit_is_told_of_what_was_not_counted(medium: GraphReport, uniform: Uniform) -> None:
    assert at_the_limit(CostModel(replace(medium, memory={}), H100), uniform(medium)) == []
    large = decoder_report(PRESETS["llama3-70b"], batch=2, seq=128)
    (only,) = at_the_limit(CostModel(large, H100), {"keep": {}})
    assert (only.samples, only.tokens_per_s) == (0, 0.0)
