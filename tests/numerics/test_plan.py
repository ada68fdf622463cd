"""Compiling plans: native dtypes, labels, what is emulated where."""

from __future__ import annotations

import torch

from autoprec.numerics.plan import compile_plan, native_dtype
from autoprec.policy import LayerPlan
from autoprec.precision.recipes import BUILTIN_RECIPES

BF16, FP16, ROW = BUILTIN_RECIPES["bf16"], BUILTIN_RECIPES["fp16"], BUILTIN_RECIPES["fp8_rowwise"]


def test_native_plans() -> None:
    assert native_dtype(LayerPlan.uniform(BF16), "cpu") is torch.bfloat16
    assert native_dtype(LayerPlan.uniform(FP16), "cpu") is None
    assert native_dtype(LayerPlan.uniform(FP16), "cuda") is torch.float16
    assert native_dtype(LayerPlan.uniform(None), "cpu") is None
    assert native_dtype(LayerPlan(fprop=BF16, dgrad=BF16), "cpu") is None
    assert native_dtype(LayerPlan.uniform(ROW), "cuda") is None


def test_keep_follows_the_scripts_dtype() -> None:
    for dtype, name in ((torch.float32, "fp32"), (torch.bfloat16, "bf16"), (torch.float64, "fp64")):
        steps = compile_plan(LayerPlan(fprop=ROW), dtype, "cpu")
        assert steps.wgrad.first.format == name
        assert steps.labels == {"fprop": ROW.describe(), "dgrad": "keep", "wgrad": "keep"}


def test_what_remembers_something_is_stateful() -> None:
    stateful = {
        name
        for name, recipe in BUILTIN_RECIPES.items()
        if compile_plan(LayerPlan.uniform(recipe), torch.float32, "cpu").stateful
    }
    assert stateful == {"fp8_delayed", "nvfp4"}


def test_an_fp32_output_is_not_autograds_own_business() -> None:
    steps = compile_plan(LayerPlan.uniform(BUILTIN_RECIPES["bf16_fp32_output"]), torch.bfloat16, "cuda")
    assert native_dtype(LayerPlan.uniform(BUILTIN_RECIPES["bf16_fp32_output"]), "cuda") is None
    assert (steps.fprop.wide, steps.dgrad.wide, steps.wgrad.wide) == (True, False, False)
    assert steps.wide_output
    assert steps.labels == {"fprop": "bf16 -> fp32", "dgrad": "bf16", "wgrad": "bf16"}
