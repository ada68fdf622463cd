from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from autoprec.cost import CostModel, CostScale
from autoprec.cost.planning import break_even_tokens, payback, scale_notes, scale_out, sweep, tensor_parallel_share
from autoprec.cost.transformer import PRESETS, DecoderConfig, decoder_report
from autoprec.errors import UsageError
from autoprec.graph.report import GraphReport, Operator
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
    never = payback(100.0, 1.0)
    assert never.steps == float("inf")
    assert never.to_json()["steps"] is None
    assert payback(100.0, 1.25, 1.0).steps == float("inf")  # the script as written is that much faster than bf16
    assert payback(100.0, 1.25, 2.0) == found
    assert payback(100.0, 1.25, 1.1).saved_ms_per_step == pytest.approx(8.0)


def test_one_gpu_is_the_model_itself(large: GraphReport, uniform: Uniform) -> None:
    plans = uniform(large)
    model = CostModel(large, H100)
    (alone,) = scale_out(model, plans["fp8_tensorwise"], plans["bf16"], [1])
    assert alone.baseline_ms == pytest.approx(model.estimate(plans["bf16"]).time_ms, rel=1e-6)
    assert alone.exposed == 0.0
    assert alone.speedup > 1.1
    assert not alone.fits  # 8B parameters with Adam take 128 GB


def test_a_script_that_shards_its_layers_is_refused_one_that_clips_sharded_gradients_is_not(
    medium: GraphReport, uniform: Uniform
) -> None:
    plans = uniform(medium)
    exchange = Operator("x", "", "_c10d_functional::all_reduce", "forward", "", "", "", ((),), ("fp32",), 0, 4)

    def planned(**changes: Any) -> Any:
        model = CostModel(replace(medium, **changes), H100)
        return scale_out(model, plans["fp8_tensorwise"], plans["bf16"], [8])

    with pytest.raises(UsageError, match="tensor parallelism"):
        planned(operators=(*medium.operators, exchange))
    clips = replace(exchange, phase="update")
    assert planned(operators=(*medium.operators, clips), held=0.5)[0].speedup == pytest.approx(
        planned()[0].speedup, rel=1e-3
    )


def test_what_is_saved_for_backward_has_to_fit_as_well(uniform: Uniform) -> None:
    report = decoder_report(PRESETS["llama3-8b"], batch=4, seq=8192)
    plans, model = uniform(report), CostModel(report, H100)
    whole, split = (
        scale_out(model, plans["fp8_delayed"], plans["bf16"], [64], tensor_parallel=ways)[0] for ways in (1, 8)
    )
    held = model.memory(plans["bf16"])
    assert held is not None
    assert whole.saved_bytes == pytest.approx(held.saved + held.weight_casts, rel=1e-6)
    assert whole.state_bytes < H100.memory_bytes < whole.state_bytes + whole.saved_bytes
    assert not whole.fits
    assert held.saved / 8 < split.saved_bytes < held.saved / 2  # what every rank holds whole is not divided
    model.report.memory.clear()
    (unknown,) = scale_out(model, plans["fp8_delayed"], plans["bf16"], [64])
    assert unknown.saved_bytes is None
    assert unknown.fits


def test_more_gpus_wait_more_and_gain_less(uniform: Uniform) -> None:
    large = decoder_report(PRESETS["llama3-8b"], batch=1, seq=4096)
    plans = uniform(large)
    points = scale_out(CostModel(large, H100), plans["fp8_delayed"], plans["bf16"], [8, 64, 1024])
    assert [p.data_parallel for p in points] == [8, 64, 1024]
    assert points[0].exposed <= points[1].exposed <= points[2].exposed > 0
    assert points[-1].speedup <= points[0].speedup
    assert points[-1].state_bytes < points[0].state_bytes < H100.memory_bytes  # optimizer state is shared


def test_tensor_parallelism_divides_the_work_and_shrinks_the_gain(large: GraphReport, uniform: Uniform) -> None:
    plans = uniform(large)
    model = CostModel(large, H100)
    (whole,) = scale_out(model, plans["fp8_tensorwise"], plans["bf16"], [1])
    (split,) = scale_out(model, plans["fp8_tensorwise"], plans["bf16"], [8], tensor_parallel=8)
    assert whole.baseline_ms / 9 < split.baseline_ms < whole.baseline_ms / 3
    assert split.speedup < whole.speedup
    assert split.exposed > 0


def test_a_rank_casts_what_it_gathers_whole_or_its_share(large: GraphReport, uniform: Uniform) -> None:
    plans = uniform(large)["fp8_tensorwise"]
    model = CostModel(large, H100)
    late, early = (tensor_parallel_share(model, 8, early_casts=early) for early in (False, True))
    name = "model.layers.3.mlp.gate_proj"  # its outputs are divided, its input is gathered
    whole, some, less = (m.layer_cost(name, plans[name]) for m in (model, late, early))
    assert less.cast < some.cast < whole.cast
    assert some.gemm == less.gemm < whole.gemm / 4
    (point,) = scale_out(model, plans, uniform(large)["bf16"], [8], tensor_parallel=8)
    assert point.early_casts_speedup > point.speedup
    (alone,) = scale_out(model, plans, uniform(large)["bf16"], [8])
    assert alone.early_casts_speedup == alone.speedup
    assert tensor_parallel_share(model, 1) is model


def test_notes_say_what_takes_the_gain(large: GraphReport, uniform: Uniform) -> None:
    model, plans = CostModel(large, H100), uniform(large)
    fast, base = plans["fp8_tensorwise"], plans["bf16"]
    points = scale_out(model, fast, base, [8, 1024], tensor_parallel=8)
    tensor, waiting = scale_notes(model, points, fast, base)
    assert "on one GPU and" in tensor
    assert f"from {points[-1].accumulation:,} passes per optimizer step" in waiting
    assert points[-1].accumulation > points[0].accumulation == 1
    assert points[-1].speedup < points[-1].accumulated_speedup
    assert points[0].accumulated_speedup == points[0].early_casts_speedup
    (calm,) = scale_out(model, fast, base, [1])
    assert scale_notes(model, [calm], fast, base) == []
    odd = CostModel(decoder_report(PRESETS["nanochat-d26"], batch=1, seq=2048), TARGETS["b200"])
    mx, bf16 = (uniform(odd.report, ["mxfp8", "bf16"])[name] for name in ("mxfp8", "bf16"))
    found = scale_notes(odd, scale_out(odd, mx, bf16, [8], tensor_parallel=8), mx, bf16)
    assert any("layers run 16 bits: their share" in note for note in found)


@pytest.mark.parametrize(("gpus", "ways"), [([4], 8), ([12], 8), ([16], 16), ([8], 0)])
def test_impossible_layouts_are_refused(large: GraphReport, gpus: list[int], ways: int) -> None:
    with pytest.raises(UsageError):
        scale_out(CostModel(large, H100), {}, {}, gpus, tensor_parallel=ways)


def test_a_share_too_small_for_the_recipe_runs_the_baseline(uniform: Uniform) -> None:
    """Width 1664 over 8 GPUs is 208, no multiple of MXFP8's 32."""
    report = decoder_report(PRESETS["nanochat-d26"], batch=1, seq=2048)
    plans = {**uniform(report), **uniform(report, ["mxfp8"])}
    model = CostModel(report, TARGETS["b200"])
    alone, split = (scale_out(model, plans["mxfp8"], plans["bf16"], [8], tensor_parallel=ways)[0] for ways in (1, 8))
    assert alone.speedup != pytest.approx(1.0, abs=1e-3)
    mlp = {n: p for n, p in plans["mxfp8"].items() if ".mlp." in n}  # 6656 / 8 = 832 is a multiple
    rest = {n: p for n, p in plans["bf16"].items() if n not in mlp}
    head = {"lm_head": plans["mxfp8"]["lm_head"]}  # 32768 / 8
    same = scale_out(model, {**rest, **mlp, **head}, plans["bf16"], [8], tensor_parallel=8)[0]
    assert split.policy_ms == pytest.approx(same.policy_ms)


def test_a_cpu_has_no_links(tiny: GraphReport, cpu_rates: None) -> None:
    with pytest.raises(UsageError, match="no links"):
        scale_out(CostModel(tiny, TARGETS["cpu"]), {}, {}, [8])
