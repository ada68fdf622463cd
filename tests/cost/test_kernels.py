from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoprec.cost.kernels import (
    cast_traffic,
    eager_traffic,
    gemm_seconds,
    grouped_traffic,
    kept_family,
    layer_cost,
    operand_bytes,
    operand_cast,
)
from autoprec.cost.rates import default_rates
from autoprec.cost.scale import GemmWork
from autoprec.policy.schema import LayerPlan
from autoprec.precision.hardware import TARGETS
from autoprec.precision.recipes import BUILTIN_RECIPES as R

H100 = TARGETS["h100"]
RATES = default_rates(H100)
ROLES = ("fprop", "dgrad", "wgrad")


def linear(m: int, k: int, n: int, roles: tuple[str, ...] = ROLES) -> GemmWork:
    return GemmWork(m, k, n, 1, 1.0, roles)


def seconds(work: GemmWork, recipe: str | None, **settings: object) -> float:
    plan = LayerPlan.uniform(R[recipe]) if recipe else LayerPlan()
    return layer_cost(H100, RATES, work, plan, script="bf16", **settings).seconds  # type: ignore[arg-type]


def test_a_large_gemm_reaches_its_share_of_the_peak() -> None:
    time = gemm_seconds(H100, RATES, "bf16", 16384, 16384, 16384)
    reached = 2 * 16384**3 / time / 989e12
    assert reached == pytest.approx(RATES.gemm["bf16"], rel=0.03)


def test_a_thin_gemm_is_bound_by_traffic() -> None:
    time = gemm_seconds(H100, RATES, "bf16", 16, 8192, 8192)
    assert time == pytest.approx(8192 * 8192 * 2 / (H100.bandwidth * RATES.bandwidth), rel=0.2)


def test_what_the_device_does_not_multiply_takes_forever() -> None:
    assert math.isinf(gemm_seconds(H100, RATES, "nvfp4", 128, 128, 128))
    assert math.isinf(gemm_seconds(TARGETS["a100"], RATES, "fp8_row", 128, 128, 128))
    assert math.isinf(gemm_seconds(TARGETS["mi300x"], RATES, "fp8_block", 128, 128, 128))


@given(st.integers(1, 512), st.integers(1, 512), st.integers(1, 512))
def test_time_grows_with_every_dimension(m: int, k: int, n: int) -> None:
    base = gemm_seconds(H100, RATES, "bf16", 16 * m, 16 * k, 16 * n)
    assert base > 0
    assert gemm_seconds(H100, RATES, "bf16", 32 * m, 16 * k, 16 * n) >= base
    assert gemm_seconds(H100, RATES, "bf16", 16 * m, 32 * k, 16 * n) >= base * 0.999
    assert gemm_seconds(H100, RATES, "bf16", 16 * m, 16 * k, 32 * n) >= base


def test_large_layers_gain_and_small_layers_lose() -> None:
    large, small = linear(16384, 8192, 8192), linear(1024, 256, 256)
    assert seconds(large, "bf16") / seconds(large, "fp8_tensorwise") > 1.4
    assert seconds(small, "bf16") / seconds(small, "fp8_tensorwise") < 0.8


def test_rowwise_casts_cost_more_than_tensorwise_than_delayed() -> None:
    work = linear(8192, 4096, 4096)
    casts = [
        layer_cost(H100, RATES, work, LayerPlan.uniform(R[name]), script="bf16").cast
        for name in ("fp8_rowwise", "fp8_tensorwise", "fp8_delayed")
    ]
    assert casts == sorted(casts, reverse=True)
    assert casts[-1] > 0


def test_wgrad_in_bf16_costs_gemm_time_and_saves_casts() -> None:
    work = linear(8192, 4096, 4096)
    row, mixed = (
        LayerPlan.uniform(R["fp8_rowwise"]),
        LayerPlan(fprop=R["fp8_rowwise"], dgrad=R["fp8_rowwise"], wgrad=R["bf16"]),
    )
    full = layer_cost(H100, RATES, work, row, script="bf16")
    half = layer_cost(H100, RATES, work, mixed, script="bf16")
    assert half.gemm > full.gemm
    assert half.cast < full.cast


def test_keep_casts_nothing_and_autocast_casts_fp32_operands() -> None:
    work = linear(4096, 1024, 1024)
    assert layer_cost(H100, RATES, work, LayerPlan(), script="bf16").cast == 0.0
    fp32 = layer_cost(H100, RATES, work, LayerPlan(), script="fp32")
    assert fp32.cast == 0.0
    autocast = layer_cost(H100, RATES, work, LayerPlan(), script="fp32", activations="bf16")
    assert autocast.cast > 0  # the weight is stored in fp32
    assert autocast.gemm < fp32.gemm / 3


def test_a_recipe_inside_an_fp32_script_casts_activations_too() -> None:
    work = linear(4096, 1024, 1024)
    plan = LayerPlan.uniform(R["bf16"])
    alone = layer_cost(H100, RATES, work, plan, script="fp32").cast
    within = layer_cost(H100, RATES, work, plan, script="fp32", activations="bf16").cast
    assert alone > within > 0


def test_cached_weight_casts_are_shared() -> None:
    work = linear(512, 8192, 8192)
    once, shared = seconds(work, "fp8_rowwise"), seconds(work, "fp8_rowwise", weight_reuse=8.0)
    assert shared < once


def test_a_first_layer_casts_its_grad_output_for_wgrad_only() -> None:
    both = layer_cost(H100, RATES, linear(4096, 1024, 1024), LayerPlan.uniform(R["mxfp8"]), script="bf16").cast
    first = layer_cost(
        H100, RATES, linear(4096, 1024, 1024, ("fprop", "wgrad")), LayerPlan.uniform(R["mxfp8"]), script="bf16"
    ).cast
    assert first < both


@pytest.mark.parametrize("family", ["fp8_tensor", "fp8_delayed", "fp8_row", "fp8_block", "mxfp8", "nvfp4", "int8"])
def test_two_uses_move_more_than_one_and_bf16_sources_less_than_fp32(family: str) -> None:
    one, kernels = cast_traffic(family, (0,), 2.0, layouts=2)
    two, _ = cast_traffic(family, (0, 1), 2.0, layouts=2)
    assert 0 < one < two
    assert cast_traffic(family, (0, 1), 4.0, layouts=2)[0] > two
    assert kernels >= 1


def test_casts_compiled_by_torch_write_both_layouts_and_read_mx_sources_twice() -> None:
    def moved(family: str, library: bool) -> float:
        return cast_traffic(family, (0, 1), 2.0, layouts=1, library=library)[0]

    assert moved("fp8_tensor", False) == moved("fp8_tensor", True) + 1.0
    assert moved("mxfp8", False) == moved("mxfp8", True) + 2.0


def test_a_row_wise_weight_costs_ten_bytes_per_value_and_an_activation_eight() -> None:
    assert cast_traffic("fp8_row", (0, 1), 2.0, layouts=2, weight=True)[0] == 10.0
    assert cast_traffic("fp8_row", (0, 1), 2.0, layouts=2)[0] == 8.0


def test_a_row_wise_forward_pays_for_its_epilogue_most_where_sums_are_short() -> None:
    def ratio(k: int, backward: bool = False) -> float:
        row, tensor = (
            gemm_seconds(H100, RATES, f, 8192, k, 8192, backward=backward) for f in ("fp8_row", "fp8_tensor")
        )
        return row / tensor

    assert ratio(1024) > ratio(4096) > ratio(16384) > 1.0
    assert ratio(1024, backward=True) == pytest.approx(1.0)


def test_layers_that_read_one_input_share_its_cast() -> None:
    work, plan = linear(8192, 4096, 4096), LayerPlan.uniform(R["fp8_rowwise"])
    alone, shared = (layer_cost(H100, RATES, work, plan, script="bf16", input_reuse=n) for n in (1.0, 3.0))
    assert shared.cast < alone.cast
    assert shared.gemm == alone.gemm


def test_unknown_families_move_nothing() -> None:
    assert cast_traffic("bf16", (0, 1), 2.0, layouts=2) == (0.0, 0)


def test_operands_are_as_wide_as_their_format() -> None:
    assert operand_bytes("bf16") == 2
    assert operand_bytes("fp8_row") == 1
    assert operand_bytes("nvfp4") < operand_bytes("mxfp8") < 1.1


def test_an_operand_already_in_the_format_is_not_cast() -> None:
    assert operand_cast(H100, RATES, R["bf16"], 1e6, (0, 1), 2.0) == (0.0, 0)
    assert operand_cast(H100, RATES, R["bf16"], 1e6, (0, 1), 4.0) > (0.0, 0)


def test_kept_layers_follow_autocast() -> None:
    assert kept_family("keep", "fp32") == "fp32"
    assert kept_family("bf16", "fp32") == "bf16"


@pytest.mark.parametrize("name", ["fp8_tensorwise", "fp8_delayed", "fp8_rowwise", "fp8_block"])
def test_a_cast_fused_with_the_operator_before_is_cheaper(name: str) -> None:
    work = linear(8192, 4096, 4096)
    plan = LayerPlan.uniform(R[name])
    apart, fused = (layer_cost(H100, RATES, work, plan, script="bf16", fused=f).cast for f in (False, True))
    assert 0 < fused < apart
    spared = 8192 * 4096 * 2.0 / (H100.bandwidth * RATES.cast[_family(name)])
    assert apart - fused == pytest.approx(spared, rel=0.2)


def _family(name: str) -> str:
    from autoprec.precision.hardware import recipe_family

    return recipe_family(R[name])


def test_casts_that_no_compiler_fuses_cost_what_they_launch_and_move() -> None:
    from autoprec.cost.kernels import eager_traffic

    assert eager_traffic("fp8_tensor", (0, 1), 2.0) == (6.0, 2)  # read twice, written twice
    assert eager_traffic("fp8_row", (0,), 4.0) == (9.0, 2)
    assert eager_traffic("fp8_block", (0, 1), 2.0) == (4.0, 1)
    for family in ("mxfp8", "fp8_delayed"):  # operator by operator: delayed scales are not compiled by themselves
        assert eager_traffic(family, (0, 1), 2.0) == (2 * 25.0, 2 * 34)


def test_an_fp32_output_writes_four_bytes_per_value() -> None:
    """A head of a large vocabulary is bound by what it writes."""
    head = linear(4096, 64, 50304, ("fprop",))
    added = seconds(head, "bf16_fp32_output") - seconds(head, "bf16")
    assert added == pytest.approx(2.0 * 4096 * 50304 / (H100.bandwidth * RATES.bandwidth), rel=1e-6)
    back = linear(4096, 64, 50304, ("dgrad", "wgrad"))
    assert seconds(back, "bf16_fp32_output") == seconds(back, "bf16")


def test_casts_of_grouped_products_cost_what_they_launch() -> None:
    # as 2026-11-23_gpu_ready.md counts them: 3 kernels for an operand with two uses, 1 for the sum over tokens alone
    assert grouped_traffic("fp8_row", (0, 1), 2.0, weight=False, eager=True) == (10.0, 3)
    assert grouped_traffic("fp8_row", (1,), 2.0, weight=True, eager=True) == (5.0, 1)
    assert grouped_traffic("fp8_row", (0, 1), 2.0, weight=False, eager=False)[1] == 2
    assert grouped_traffic("fp8_row", (0, 1), 2.0, weight=True, eager=False) == cast_traffic(
        "fp8_row", (0, 1), 2.0, layouts=2, weight=True
    )
    # as 2026-11-23_gpu_ready.md counts the casts of `backends.experts`; kernels of a compiled block of experts
    assert grouped_traffic("mxfp8", (0, 1), 2.0, weight=False, eager=True)[1] == 57 + 100
    assert grouped_traffic("mxfp8", (0, 1), 2.0, weight=True, eager=True) == eager_traffic("mxfp8", (0, 1), 2.0)
    assert grouped_traffic("mxfp8", (0, 1), 2.0, weight=False, eager=False)[1] == 2 * 3
