from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autoprec.cost.calibrate import cpu
from autoprec.cost.calibrate.cpu import FALLBACK, CpuCost, cache_file, cpu_rates
from autoprec.cost.scale import CostScale, GemmWork
from autoprec.graph.report import GraphReport, Operator
from autoprec.policy.schema import LayerPlan
from autoprec.precision.recipes import BUILTIN_RECIPES as R

ROLES = ("fprop", "dgrad", "wgrad")
RATES = {
    **FALLBACK,
    "gemm": {
        "fp32": {role: [1e-11, 1e-11, 1e-5] for role in ROLES},
        "bf16": {role: [2e-12, 1e-11, 1e-5] for role in ROLES},
        "int8": {role: [1e-12, 1e-11, 1e-5] for role in ROLES},
    },
    "integer": {"row": [2e-10, 1e-5], "tensor": [1e-10, 1e-5]},
}
COST = CpuCost(RATES)
WORK = GemmWork(512, 256, 1024, 1, 1.0, ROLES)


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    cpu._load.cache_clear()
    yield
    cpu._load.cache_clear()


def seconds(plan: LayerPlan, activations: str = "keep", script: str = "fp32", kind: str = "linear") -> float:
    return COST.layer_cost(WORK, plan, activations=activations, script=script, kind=kind).seconds


class Probe:
    """Stands in for the micro-benchmark: each call returns the next record."""

    def __init__(self, *records: dict[str, float]) -> None:
        self.records, self.calls = list(records), 0

    def __call__(self) -> dict[str, object]:
        self.calls += 1
        return {**RATES, **(self.records.pop(0) if len(self.records) > 1 else self.records[0])}


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[dict[str, Any], str]]:
    """A function: a process that begins at a load of so much asks for the rates."""

    def asked(probe: Probe, load: float = 0.0) -> tuple[dict[str, Any], str]:
        monkeypatch.setattr(cpu, "_probe", probe)
        monkeypatch.setattr(cpu, "_load_average", lambda: load)
        cpu._load.cache_clear()
        return cpu_rates()

    return asked


Later = Callable[..., tuple[dict[str, Any], str]]


def test_rates_are_measured_once_and_then_cached(later: Later) -> None:
    probe = Probe({"spread": 0.01})
    assert later(probe)[1] == "modelled, rates of this CPU"
    rates, label = later(probe)
    assert label.endswith("(measured earlier)")
    assert probe.calls == 1
    assert json.loads(cache_file().read_text())["gemm"] == rates["gemm"]
    cpu_rates(refresh=True)
    assert probe.calls == 2


def test_rates_whose_repeats_disagree_are_not_kept_for_good(later: Later) -> None:
    probe = Probe({"spread": 0.4, "pace": -7.0}, {"spread": 0.02, "pace": -6.9})
    assert later(probe)[1] == "modelled, rates of this CPU, whose repeats differ by 40%"
    rates, label = later(probe)
    assert rates["spread"] == 0.02
    assert label == "modelled, rates of this CPU"
    later(probe)
    assert probe.calls == 2


def test_a_machine_that_is_never_quiet_is_not_measured_for_ever(later: Later) -> None:
    probe = Probe({"spread": 0.4, "pace": -7.0}, {"spread": 0.3, "pace": -6.9})
    for _ in range(6):
        rates, label = later(probe, 3.0)
    assert probe.calls == 3
    assert rates["pace"] == -7.0
    assert "40%" in label


def test_rates_that_were_measured_beside_a_load_are_measured_again_where_it_is_quiet(later: Later) -> None:
    probe = Probe({"spread": 0.0, "pace": -6.5}, {"spread": 0.0, "pace": -7.0}, {"spread": 0.0, "pace": -6.8})
    later(probe, 4.0)
    assert later(probe, 3.0)[0]["pace"] == -6.5
    assert probe.calls == 1
    assert later(probe, 1.0)[0]["pace"] == -7.0
    assert later(probe, 0.2)[0]["pace"] == -7.0  # the new ones are slower
    later(probe, 0.0)
    assert probe.calls == 3


def test_a_record_outlives_a_probe_that_cannot_run(later: Later, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = later(Probe({"spread": 0.4}))[0]
    monkeypatch.setattr(cpu, "_probe", lambda: None)
    cpu._load.cache_clear()
    rates, label = cpu_rates()
    assert rates == kept
    assert "measured earlier" in label


@pytest.mark.parametrize("content", ["", "{", "[]", '{"gemm": 1}'])
def test_a_damaged_cache_is_measured_again(monkeypatch: pytest.MonkeyPatch, content: str) -> None:
    cache_file().parent.mkdir(parents=True)
    cache_file().write_text(content)
    monkeypatch.setattr(cpu, "_probe", lambda: dict(RATES))
    assert cpu_rates()[1] == "modelled, rates of this CPU"


def test_a_probe_that_cannot_run_falls_back_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu.sys, "executable", "/nonexistent/python")
    rates, label = cpu_rates()
    assert rates == FALLBACK
    assert "uncalibrated" in label


def test_a_cache_that_cannot_be_written_costs_nothing_else(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    monkeypatch.setattr(cpu, "_probe", lambda: dict(RATES))
    assert cpu_rates()[1] == "modelled, rates of this CPU"


def test_relative_cache_homes_are_ignored_as_the_standard_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_file().is_absolute()


@pytest.mark.slow
def test_the_micro_benchmark_measures_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "_PROBE_TIMEOUT_S", 600.0)  # a busy machine is not a reason to fail
    rates, label = cpu_rates(refresh=True)
    assert label.startswith("modelled, rates of this CPU")
    assert rates["seconds"] < 40  # 6 to 12 s of CPU time where nothing else runs
    for name, fallback in FALLBACK.items():
        assert not isinstance(fallback, dict) or set(fallback) <= set(rates[name]), name
    for form in ("fp32", "bf16"):
        for role in ROLES:
            assert 1e-14 < rates["gemm"][form][role][0] + rates["gemm"][form][role][1] < 1e-8


def test_bf16_gains_fp8_loses_on_a_cpu() -> None:
    keep, bf16 = seconds(LayerPlan()), seconds(LayerPlan.uniform(R["bf16"]), "bf16")
    assert bf16 < keep / 2
    assert bf16 == pytest.approx(seconds(LayerPlan(), "bf16"))
    for name in ("fp8_tensorwise", "fp8_rowwise", "mxfp8", "nvfp4"):
        assert seconds(LayerPlan.uniform(R[name]), "bf16") > bf16


def test_casts_are_paid_where_the_model_stays_in_fp32() -> None:
    alone, within = seconds(LayerPlan.uniform(R["bf16"])), seconds(LayerPlan.uniform(R["bf16"]), "bf16")
    assert within < alone
    assert seconds(LayerPlan.uniform(R["fp32"])) == seconds(LayerPlan())
    assert seconds(LayerPlan(), script="bf16") < within


def test_fp16_is_emulated_on_a_cpu() -> None:
    assert seconds(LayerPlan.uniform(R["fp16"])) > seconds(LayerPlan.uniform(R["bf16"]))


def test_int8_runs_on_its_own_units_with_the_casts_of_its_scales() -> None:
    tensor, row, bf16 = (seconds(LayerPlan.uniform(R[name])) for name in ("int8_tensor", "int8", "bf16"))
    assert tensor < row < bf16
    half = LayerPlan(fprop=R["int8"], dgrad=R["int8"], wgrad=R["bf16"])
    assert row < seconds(half) < bf16
    assert row < seconds(LayerPlan(fprop=R["int8"], dgrad=R["int8"])) < seconds(LayerPlan())


def test_int8_sums_are_narrowed_where_the_rest_is_in_16_bits() -> None:
    plan = LayerPlan.uniform(R["int8"])
    out, values = WORK.elements("grad_output"), WORK.elements("grad_output") + WORK.elements("input")
    per_value, fixed = RATES["casts"]["down"]
    bias = COST._cast("up", out) + COST._cast("down", out)  # added in float32
    assert seconds(plan, "bf16") - seconds(plan) == pytest.approx(values * per_value + 2 * fixed + bias)


def test_autocast_casts_what_a_wide_operator_hands_to_a_layer_and_the_gradient_back() -> None:
    how = {"activations": "bf16", "script": "fp32"}
    narrow, wide = (COST.layer_cost(WORK, LayerPlan(), **how, given=given).seconds for given in (2.0, 4.0))
    values = WORK.elements("input")
    assert wide - narrow == pytest.approx(COST._cast("down", values) + COST._cast("up", values))


def test_a_layer_of_any_size_is_handled() -> None:
    rates = {**RATES, "handling": {"cast": 1.0, "autocast": 2.0, "mixed": 4.0}}
    cost, mixed = CpuCost(rates), LayerPlan(fprop=R["int8"], dgrad=R["int8"])

    def handled(plan: LayerPlan, activations: str = "keep", kind: str = "linear") -> int:
        return int(cost.layer_cost(WORK, plan, activations=activations, script="fp32", kind=kind).cast)

    bf16 = LayerPlan.uniform(R["bf16"])
    assert [handled(plan) for plan in (LayerPlan(), bf16, LayerPlan.uniform(R["int8"]), mixed)] == [0, 1, 0, 4]
    assert [handled(plan, "bf16") for plan in (LayerPlan(), bf16, mixed)] == [2, 2, 4]
    assert handled(bf16, kind="rnn") == 0


def test_recurrent_layers_have_their_own_factor() -> None:
    cost = CpuCost({**RATES, "recurrent": {"fp32": 1.25, "bf16": 1.5}})
    times = [
        cost.layer_cost(WORK, LayerPlan(), activations="keep", script="fp32", kind=kind).seconds
        for kind in ("linear", "rnn")
    ]
    assert times[1] == pytest.approx(1.25 * times[0])


def test_rates_under_other_instructions_are_another_file(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {cache_file()}
    for name in ("ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS"):
        monkeypatch.setenv(name, "AVX2")
        files.add(cache_file())
    assert len(files) == 3


def test_single_gemms_can_be_emulated() -> None:
    mixed = LayerPlan(fprop=R["fp8_rowwise"], dgrad=R["fp8_rowwise"], wgrad=R["bf16"])
    assert seconds(LayerPlan.uniform(R["bf16"])) < seconds(mixed) < seconds(LayerPlan.uniform(R["fp8_rowwise"]))


def test_convolutions_have_their_own_factor() -> None:
    assert seconds(LayerPlan(), kind="conv") == pytest.approx(1.5 * seconds(LayerPlan()))


def test_the_rest_of_a_step(tiny: GraphReport) -> None:
    fp32 = replace(tiny, operators=tuple(replace(op, dtypes=("fp32",), bytes=2 * op.bytes) for op in tiny.operators))
    plain = COST.rest_cost(dict(enumerate(fp32.operators)), CostScale(), activations="keep", attention="keep")
    low = COST.rest_cost(dict(enumerate(fp32.operators)), CostScale(), activations="bf16", attention="keep")
    assert plain.seconds["norm"] == low.seconds["norm"]
    assert plain.seconds["attention"] > 0
    pinned = COST.rest_cost(dict(enumerate(fp32.operators)), CostScale(), activations="bf16", attention="fp32")
    assert pinned.seconds["attention"] == plain.seconds["attention"]
    more = COST.rest_cost(dict(enumerate(fp32.operators)), CostScale(tokens=4), activations="keep", attention="keep")
    assert more.seconds["pointwise"] > 2 * plain.seconds["pointwise"]
    for fused in (False, True):
        assert COST.update_seconds(1e6, 10, fused=fused) > COST.update_seconds(1e5, 10, fused=fused) > 0
    assert COST.update_seconds(1e6, 10, fused=True) < COST.update_seconds(1e6, 10, fused=False)
    moved = {"activations": "keep", "attention": "keep", "views": 100}
    viewed = COST.rest_cost(dict(enumerate(fp32.operators)), CostScale(), **moved)
    assert viewed.seconds["other"] - plain.seconds["other"] == pytest.approx(3e-4)


def attention(
    seq: int, phase: str = "forward", op: str = "aten::_scaled_dot_product_flash_attention_for_cpu"
) -> Operator:
    query = (2, 4, seq, 32)
    flops = 4 * 2 * 4 * seq * seq * 32
    return Operator("sdpa", "h.0.attn", op, phase, "attention", "follow", "", (query,) * 4, ("fp32",) * 4, flops, 1000)


def test_fused_attention_has_two_regimes() -> None:
    """Rates of FlashAttentionKernel.cpp change where its blocks of query rows do."""
    slow = {"forward": [1e-10, 0.0, 0.0], "backward": [3e-10, 0.0, 0.0]}
    fast = {"forward": [1e-11, 0.0, 1e-6], "backward": [3e-11, 0.0, 1e-6]}
    regimes = {form: {"short": slow, "long": fast} for form in ("fp32", "bf16")}
    cost = CpuCost({**RATES, "attention": regimes})

    def spent(operator: Operator) -> float:
        found = cost.rest_cost({0: operator}, CostScale(), activations="keep", attention="keep").seconds
        return found["attention"]

    assert spent(attention(128)) == pytest.approx(1e-10 * attention(128).flops)
    assert spent(attention(128, "backward")) == pytest.approx(3e-10 * attention(128).flops)
    assert spent(attention(192)) == pytest.approx(1e-11 * attention(192).flops + 1e-6 * 2 * 4 * 192)


def test_attention_written_by_hand_costs_what_its_multiplications_do() -> None:
    written = replace(attention(128, op="aten::bmm"), shapes=((8, 128, 32), (8, 32, 128)), flops=2 * 8 * 128 * 128 * 32)
    found = COST.rest_cost({0: written}, CostScale(), activations="keep", attention="keep").seconds["attention"]
    assert found == pytest.approx(1e-11 * written.flops + 1e-11 * 1000 + 1e-5)


def test_rates_are_kept_somewhere_for_a_user_without_a_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def nobody(_number: int) -> None:
        raise KeyError

    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr("pwd.getpwuid", nobody)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert cache_file().parent == tmp_path / "autoprec"
