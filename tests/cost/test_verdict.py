from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from autoprec.cost import CostModel, CostScale, judge, reasons
from autoprec.graph.report import GraphReport
from autoprec.policy.schema import LayerPlan
from autoprec.precision.hardware import TARGETS
from autoprec.precision.recipes import BUILTIN_RECIPES as R
from autoprec.support.units import speed_text
from benchmarks.cost.decoder import PRESETS, DecoderConfig, decoder_report

Uniform = Callable[..., Any]


def test_a_tiny_model_stays_in_bf16_and_says_why(tiny: GraphReport, uniform: Uniform) -> None:
    found = judge(CostModel(tiny, TARGETS["h100"]), uniform(tiny))
    assert found.kind == "stay"
    assert found.baseline == "bf16"
    assert found.bound_speedup < 1.03
    assert "too small" in found.reason
    assert "H100" in found.reason
    assert sum(share for name, share in found.shares.items() if name != "tunable") == pytest.approx(1.0)
    assert len(found.rows) == len(tiny.tunable)
    slower = [row for row in found.rows if row["best"] == "bf16"]
    assert slower
    assert all("below break-even" in row["reason"] for row in slower)


def test_the_same_model_scaled_up_is_worth_a_search(tiny: GraphReport, uniform: Uniform) -> None:
    scale = CostScale.parse("width=16,depth=4,tokens=32")
    found = judge(CostModel(tiny, TARGETS["h100"], scale=scale), uniform(tiny))
    assert found.kind == "search"
    # an estimate: what a policy adds to its layers (optimizer state, attention) may gain more
    assert found.reason.startswith(f"about {speed_text(found.bound_speedup, found.low, found.high)} over bf16")
    assert found.bound_speedup > 1.3
    best = {row["name"]: row["best"] for row in found.rows}
    assert best["lm_head"] == "bf16"  # 256 words: below break-even at any width
    assert best["model.layers.0.mlp.up_proj"].startswith("fp8")
    assert found.bound_speedup >= found.best_uniform[1]
    assert "width=16" in found.label


def test_one_choice_that_reaches_the_bound_is_adopted(large: GraphReport, uniform: Uniform) -> None:
    found = judge(CostModel(large, TARGETS["h100"]), uniform(large))
    assert found.kind == "adopt"
    assert found.best_uniform[0] == "fp8_delayed"
    assert found.reason.startswith("fp8_delayed wherever it is offered reaches the bound of 1.")
    assert found.low < found.bound_speedup < found.high


def test_a_gpu_without_fp8_says_so(large: GraphReport, uniform: Uniform) -> None:
    found = judge(CostModel(large, TARGETS["a100"]), uniform(large))
    assert found.kind == "stay"
    assert "compute capability 8.0 multiplies no FP8" in found.reason
    assert "compute capability" in found.rows[0]["refused"]["fp8_rowwise"]


def test_a_gpu_without_fp8_says_so_also_where_the_space_left_fp8_out(large: GraphReport, uniform: Uniform) -> None:
    found = judge(CostModel(large, TARGETS["a100"]), uniform(large, ["bf16", "tf32"]))
    assert "compute capability 8.0 multiplies no FP8" in found.reason
    assert "too small" not in found.reason
    assert found.rows[0]["reason"].startswith("stays in bf16: compute capability 8.0")


def test_a_layer_of_odd_size_is_not_called_too_small(uniform: Uniform) -> None:
    """A space gives a layer that cannot run a choice the baseline's plan."""
    report = decoder_report(PRESETS["gpt2"], batch=8, seq=1024)
    choices = {name: dict(plans) for name, plans in uniform(report).items()}
    for plans in choices.values():
        plans["lm_head"] = choices["bf16"]["lm_head"]
    found = judge(CostModel(report, TARGETS["h200"]), choices)
    rows = {row["name"]: row for row in found.rows}
    assert (
        rows["lm_head"]["reason"] == "stays in bf16: out_features 50257 is not a multiple of 16, which fp8_tensor needs"
    )
    assert "0 of 73 layers are below break-even, 1 without a quantised choice" in found.reason
    offered = CostModel(decoder_report(PRESETS["llama3-8b"], batch=1, seq=64), TARGETS["h200"])
    bare = judge(offered, uniform(offered.report, ["bf16"]))
    assert "the search space offers it no quantised choice" in bare.reason


def test_a_format_without_a_peak_is_refused(large: GraphReport, uniform: Uniform) -> None:
    bare = replace(TARGETS["h100"], peaks={"bf16": 989.0, "fp8": 1979.0})
    fp32 = replace(large, layers=tuple(replace(layer, dtype="fp32") for layer in large.layers))
    found = judge(CostModel(fp32, bare), {**uniform(fp32), "fp32": uniform(fp32, ["fp32"])["fp32"]})
    assert all(math.isfinite(time) for row in found.rows for time in row["times_ms"].values())
    assert "no fp32 peak" in found.rows[0]["refused"]["fp32"]


def test_without_bf16_among_the_choices_the_script_is_the_baseline(large: GraphReport, uniform: Uniform) -> None:
    found = judge(CostModel(large, TARGETS["h100"]), uniform(large, ["fp8_tensorwise"]))
    assert found.baseline == "keep"


def test_on_the_cpu_the_script_is_the_baseline_and_fp8_never_pays(
    tiny: GraphReport, uniform: Uniform, cpu_rates: None
) -> None:
    fp32 = in_fp32(tiny)
    found = judge(CostModel(fp32, TARGETS["cpu"]), uniform(fp32))
    assert found.baseline == "keep"
    assert found.kind in ("adopt", "search")
    assert found.best_uniform[0] == "bf16"
    assert {row["best"] for row in found.rows} == {"bf16"}


def test_threshold_moves_the_line(tiny: GraphReport, uniform: Uniform) -> None:
    model = CostModel(tiny, TARGETS["h100"], scale=CostScale(width=8))
    assert judge(model, uniform(tiny)).kind in ("adopt", "search")
    assert judge(model, uniform(tiny), threshold=1.0).kind == "stay"


def test_nothing_to_tune(tiny: GraphReport) -> None:
    frozen = replace(tiny, layers=tuple(replace(layer, tunable=False) for layer in tiny.layers))
    found = judge(CostModel(frozen, TARGETS["h100"]), {"bf16": {}})
    assert (found.kind, found.reason) == ("stay", "the model has no tunable layer")


def test_the_verdict_is_plain_data(tiny: GraphReport, uniform: Uniform) -> None:
    import json

    assert json.loads(json.dumps(judge(CostModel(tiny, TARGETS["h100"]), uniform(tiny)).to_json()))["kind"] == "stay"


def test_mixed_gemms_are_judged_too(large: GraphReport) -> None:
    plan = LayerPlan(fprop=R["fp8_rowwise"], dgrad=R["fp8_rowwise"], wgrad=R["bf16"])
    choices = {
        "bf16": {layer.name: LayerPlan.uniform(R["bf16"]) for layer in large.layers},
        "gw": {layer.name: plan for layer in large.layers},
    }
    assert judge(CostModel(large, TARGETS["h100"]), choices).bound_speedup > 1.0


def in_fp32(report: GraphReport) -> GraphReport:
    return replace(
        report,
        layers=tuple(replace(layer, dtype="fp32") for layer in report.layers),
        operators=tuple(replace(op, dtypes=("fp32",), bytes=2 * op.bytes) for op in report.operators),
    )


def test_a_script_in_fp32_is_told_what_bf16_gives_it(large: GraphReport, uniform: Uniform) -> None:
    """Against bf16 there is nothing to gain on a GPU without FP8; against the script as written there is."""
    model = CostModel(in_fp32(large), TARGETS["a100"])
    found = judge(model, uniform(large))
    assert found.kind == "adopt"
    assert found.best_uniform == ("bf16", 1.0)
    assert found.bound_over_16bit == pytest.approx(found.bound_speedup) == pytest.approx(1.0)
    script = model.estimate({}, activations="keep").time_ms
    assert found.bound_over_script == pytest.approx(script / found.step_ms)
    assert found.bound_over_script > 5
    assert "over the script as written" in found.reason
    assert "compute capability 8.0 multiplies no FP8" in found.reason


def test_a_gain_over_bf16_is_none_where_the_script_as_written_is_faster(uniform: Uniform) -> None:
    """Launches rule 32 tokens in fp32: casts to bf16 cost more than they save, so 18 % over bf16 is nothing."""
    report = decoder_report(DecoderConfig(256, 4, 4, 1024, 256, gated=False), batch=1, seq=32)
    model = CostModel(in_fp32(report), TARGETS["h100"], compiled=False)
    found = judge(model, {**uniform(report), **uniform(report, ["tf32"])})
    assert found.kind == "stay"
    assert found.bound_speedup > 1.1
    assert found.bound_over_script < 1.03
    assert "the script as written" in found.reason


def test_both_bounds_are_told_apart(large: GraphReport, uniform: Uniform) -> None:
    wide = judge(CostModel(in_fp32(large), TARGETS["h100"]), uniform(large))
    assert wide.bound_over_16bit == pytest.approx(wide.bound_speedup)
    assert wide.bound_over_script > 2 * wide.bound_over_16bit > 2
    narrow = judge(CostModel(large, TARGETS["h100"]), uniform(large))  # in bf16 already
    assert narrow.bound_over_16bit <= narrow.bound_over_script * 1.0001
    assert narrow.bound_over_script < 2
    document = narrow.to_json()
    assert {"bound_over_script", "bound_over_16bit", "memory_bytes", "device_bytes", "fits"} <= set(document)


def test_a_step_that_one_device_cannot_hold_is_remarked(uniform: Uniform) -> None:
    report = decoder_report(PRESETS["llama3-70b"], batch=1, seq=4096)
    found = judge(CostModel(report, TARGETS["h100"]), uniform(report))
    assert not found.fits
    assert re.search(
        r"It does not fit: the step needs [\d,.]+ GiB .* and one .*H100.* has 74.5 GiB \(64.1 GiB less a margin\)",
        found.reason,
    )
    small = decoder_report(PRESETS["gpt2"], batch=1, seq=1024)
    fitting = judge(CostModel(small, TARGETS["h100"]), uniform(small))
    assert fitting.fits
    assert "does not fit" not in fitting.reason


SLOW_BF16 = {"fp32": 100e9, "bf16": 25e9, "int8": 30e9}


@pytest.mark.parametrize(
    ("units", "says"),
    [
        ((), r"this CPU has no bf16 instructions \(bf16 GEMMs are [34]\.\d times slower than fp32 here\)"),
        (("AVX512_BF16",), r"the GEMMs \(the largest: .*\) are [34]\.\d times slower in bf16 than in fp32 on this CPU"),
    ],
)
def test_a_cpu_on_which_bf16_is_slower_says_so(
    tiny: GraphReport, uniform: Uniform, monkeypatch: pytest.MonkeyPatch, units: tuple[str, ...], says: str
) -> None:
    # the target offers bf16, whatever machine the test runs on: what is asked is the reason
    monkeypatch.setattr("autoprec.precision.hardware.cpu_bf16_units", lambda: ("AVX512_BF16",))
    monkeypatch.setattr(reasons, "cpu_bf16_units", lambda: units)
    wide = in_fp32(tiny)
    model = CostModel(wide, TARGETS["cpu"], cpu=SLOW_BF16)
    found = judge(model, uniform(wide, ["bf16"]), script="train.py --width 64")
    assert found.kind == "stay"
    assert re.search(says, found.reason)
    assert "autoprec search --target h100 train.py --width 64" in found.reason
    assert "too small" not in found.reason
    emulated = judge(model, uniform(wide))
    assert "too small" not in emulated.reason
    assert all("casts" not in row["reason"] for row in emulated.rows)


def test_compiling_is_part_of_the_bound_where_a_policy_may_say_it(uniform: Uniform) -> None:
    """An eager script whose FP8 gains nothing is not told to stay while compiling alone gains a quarter."""
    report = decoder_report(PRESETS["gpt2"], batch=16, seq=1024)
    eager = CostModel(report, TARGETS["h100"], compiled=False)
    plans = uniform(report)
    alone = judge(eager, plans)
    found = judge(eager, plans, executions=("keep", "compile"))
    compiled = judge(eager.executed("compile"), plans)
    assert alone.execution == "keep"
    assert (found.execution, found.step_ms) == ("compile", alone.step_ms)
    assert found.kind != "stay"
    assert found.bound_speedup == pytest.approx(alone.step_ms / compiled.step_ms * compiled.bound_speedup)
    assert found.bound_over_script > alone.bound_over_script
    assert "compiling alone takes a step of bf16 from" in found.reason
    best = eager.executed("compile")
    assert judge(best, plans, executions=("keep", "compile")) == compiled  # compiled already: nothing is added


def test_compiling_alone_is_adopted_where_no_precision_adds_to_it(uniform: Uniform) -> None:
    report = decoder_report(PRESETS["gpt2"], batch=16, seq=1024)
    found = judge(CostModel(report, TARGETS["a100"], compiled=False), uniform(report), executions=("compile",))
    assert (found.kind, found.best_uniform[0]) == ("adopt", "bf16")
    assert found.best_uniform[1] == pytest.approx(found.bound_speedup)
    assert "add next to nothing: at most 1.00x over bf16" in found.reason
