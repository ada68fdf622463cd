"""What a GEMM may be off by: what rounding and the order of sums explain is allowed, and one product less is not."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from autoprec.numerics.operand import QuantizedOperand, QuantizerState
from autoprec.numerics.plan import GemmStep, compile_plan
from autoprec.numerics.quantize import quantize
from autoprec.policy import LayerPlan
from autoprec.precision.recipes import BUILTIN_RECIPES, Recipe
from autoprec.trial.inside.checking.bounds import Compared, compare, errors, shares, sum_error

NAMES = ("fp32", "bf16", "fp8_tensorwise", "fp8_rowwise", "fp8_block", "mxfp8", "int8", "int8_tensor")


def operands(
    recipe: Recipe, rows: int, inner: int, columns: int, seed: int = 0
) -> tuple[QuantizedOperand, QuantizedOperand, GemmStep, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, w = (torch.randn(size, inner, generator=generator) for size in (rows, columns))
    step = compile_plan(LayerPlan.uniform(recipe), torch.float32, "cpu").fprop
    a, b = quantize(x, step.first), quantize(w, step.second, operand="weight")
    return a, b, step, x, w


@given(st.sampled_from(NAMES), st.integers(1, 40), st.integers(1, 200), st.integers(1, 40), st.integers(0, 9))
def test_what_is_emulated_is_within_the_bound_at_every_size(
    name: str, rows: int, inner: int, columns: int, seed: int
) -> None:
    a, b, step, _, _ = operands(BUILTIN_RECIPES[name], rows, inner, columns, seed)
    for dtype in (torch.float32, torch.bfloat16):
        bias = torch.linspace(-1, 1, columns).to(dtype)
        found = step.multiply(a, b, step, dtype)
        assert compare(found, a, b, step).wrong == 0
        assert compare(found + bias, a, b, step, bias).wrong == 0


@pytest.mark.parametrize("name", NAMES)
def test_one_missing_product_of_a_thousand_is_seen(name: str) -> None:
    a, b, step, _, _ = operands(BUILTIN_RECIPES[name], 8, 1024, 64)
    codes = a.codes.clone().to(torch.float32)
    flat = codes.view(8, -1)
    flat[5, flat[5].abs().argmax()] = 0
    less = dataclasses.replace(a, codes=codes.to(a.codes.dtype))
    seen = compare(step.multiply(less, b, step, torch.float32), a, b, step)
    assert seen.wrong > 16
    assert seen.at[0] == 5
    assert seen.worst > 2


def test_a_result_of_integers_has_no_error_of_its_sums() -> None:
    a, b, step, _, _ = operands(BUILTIN_RECIPES["int8"], 4, 4096, 4)
    assert sum_error(a, b, step, 4096) == 0
    a, b, step, _, _ = operands(BUILTIN_RECIPES["fp32"], 4, 16, 4)
    assert sum_error(a, b, step, 16) == 16 * 2.0**-24
    assert sum_error(a, b, step, 4096) == 8 * 64 * 2.0**-24


def test_nan_is_wrong_where_the_product_has_none_and_right_where_it_has() -> None:
    a, b, step, _, _ = operands(BUILTIN_RECIPES["fp32"], 4, 16, 4)
    found = step.multiply(a, b, step, torch.float32)
    found[2, 1] = torch.nan
    assert compare(found, a, b, step) == Compared(1.0, 1, (2, 1), 1, pytest.approx(torch.nan, nan_ok=True))
    a.codes[2] = torch.nan
    assert compare(step.multiply(a, b, step, torch.float32), a, b, step).wrong == 0
    assert compare(torch.zeros(4, 4), a, b, step).wrong == 16, "what should be NaN and is not"


def test_a_sum_beyond_fp16_may_be_infinite() -> None:
    recipe = Recipe(format="fp16")
    a, b, step, _, _ = operands(recipe, 4, 16, 4)
    for one in (a, b):
        one.codes.fill_(200.0)
    for largest in (torch.inf, torch.finfo(torch.float16).max):
        assert compare(torch.full((4, 4), largest, dtype=torch.float16), a, b, step).wrong == 0
    assert compare(torch.full((4, 4), -torch.inf, dtype=torch.float16), a, b, step).wrong == 16


def test_rows_that_are_compared_in_parts_are_named_as_in_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b, step, _, _ = operands(BUILTIN_RECIPES["int8"], 40, 64, 8)
    found = step.multiply(a, b, step, torch.float32)
    found[33:] *= 2
    whole = compare(found, a, b, step)
    monkeypatch.setattr("autoprec.trial.inside.checking.bounds._VALUES", 64 * 7)
    assert dataclasses.replace(compare(found, a, b, step), ratio=whole.ratio) == whole
    assert whole.at == (33, 0)
    assert whole.wrong == 7 * 8
    assert whole.ratio == pytest.approx(2)


def test_errors_tell_a_format_from_a_kernel() -> None:
    a, b, step, x, w = operands(BUILTIN_RECIPES["fp8_rowwise"], 64, 256, 32)
    right = step.multiply(a, b, step, torch.float32)
    native, emulated, bf16 = errors(right, (x, w), (a, b), step)
    assert native == pytest.approx(emulated, rel=0.05)
    assert 0.02 < emulated < 0.06
    assert bf16 < 0.005
    assert errors(right.roll(1, 0), (x, w), (a, b), step)[0] > 1


def test_values_that_delayed_scales_cut_off_and_that_fall_to_zero_are_counted() -> None:
    recipe = Recipe.model_validate({"format": "fp8", "scaling": {"scale": "delayed"}})
    spec = compile_plan(LayerPlan.uniform(recipe), torch.float32, "cpu").fprop.first
    state = QuantizerState()
    quantize(torch.ones(8, 8), spec, state=state)
    state.history("input", spec).roll()
    x = torch.ones(8, 8)
    x[0, :4], x[1, :2], x[2, 0] = 3.0, 1e-9, 1.03  # rounds to the largest, is not cut off
    assert shares(x, quantize(x, spec, state=state)) == (4 / 64, 2 / 64)
    row = compile_plan(LayerPlan.uniform(BUILTIN_RECIPES["int8"]), torch.float32, "cpu").fprop.first
    assert shares(x, quantize(x, row))[0] == 0.0
