"""The layouts of torch's scaled products: checked by torch's own meta kernel, decoded again by the documented rules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from autoprec.backends.scaled_mm import blocked_multiply, scaled_multiply, tiled
from autoprec.numerics.grouped import decode_e8m0
from autoprec.numerics.operand import CONTRACTION, QuantizerState
from autoprec.numerics.plan import compile_plan
from autoprec.numerics.quantize import quantize
from autoprec.policy import LayerPlan
from autoprec.precision.recipes import BUILTIN_RECIPES, GEMM_OPERANDS, GEMMS
from tests.conformance.backends import reference_gemms

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
E2M1 = torch.cat([E2M1, -E2M1])


def untiled(flat: torch.Tensor, rows: int, groups: int) -> torch.Tensor:
    """One scale at a time, by the rule of the cuBLAS documentation."""
    wide = -(-groups // 4)
    found = torch.empty(rows, groups, dtype=flat.dtype)
    for row in range(rows):
        for group in range(groups):
            tile = (row // 128) * wide + group // 4
            found[row, group] = flat[tile * 512 + (row % 32) * 16 + (row % 128) // 32 * 4 + group % 4]
    return found


def decoded(matrix: torch.Tensor, scales: list[torch.Tensor], how: list) -> torch.Tensor:
    """``[outer, K]`` values of one operand, from what the kernel is given."""
    kind = how[0].name
    if kind == "BlockWise1x16":
        packed = matrix.view(torch.uint8).to(torch.int64)
        values = E2M1[torch.stack([packed & 15, packed >> 4], -1).flatten(1)]
        groups = untiled(scales[0].view(torch.uint8), values.shape[0], values.shape[1] // 16)
        return values * groups.view(torch.float8_e4m3fn).float().repeat_interleave(16, 1) * scales[1]
    values = matrix.float()
    outer, inner = values.shape
    if kind == "BlockWise1x32":
        groups = decode_e8m0(untiled(scales[0].view(torch.uint8), outer, inner // 32))
        return values * groups.repeat_interleave(32, 1)
    if kind == "BlockWise1x128":
        return values * scales[0].repeat_interleave(128, 1)
    wide = scales[0][: inner // 128].t()  # [outer / 128, K / 128]
    return values * wide.repeat_interleave(128, 0).repeat_interleave(128, 1)


def kernel(left, right, scale_a, scale_recipe_a, scale_b, scale_recipe_b, swizzle_a, swizzle_b, output_dtype):
    """What ``F.scaled_mm`` does on a GPU: refuse wrong layouts, then multiply."""
    meta = [x.to("meta") if x.dtype != torch.float4_e2m1fn_x2 else x for x in (left, right)]
    if meta[0].is_meta:
        F.scaled_mm(
            *(torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta") for x in (left, right)),
            *([x.to("meta") for x in scale_a], scale_recipe_a),
            *([x.to("meta") for x in scale_b], scale_recipe_b),
            swizzle_a=swizzle_a,
            swizzle_b=swizzle_b,
            output_dtype=output_dtype,
        )
    else:
        assert left.stride(1) == 1
        assert right.stride(0) == 1
    assert all(size % 16 == 0 for size in (*left.shape, *right.shape))
    a, b = decoded(left, scale_a, scale_recipe_a), decoded(right.t(), scale_b, scale_recipe_b)
    return (a.double() @ b.double().t()).to(output_dtype)


@pytest.mark.parametrize("name", ["fp8_block", "fp8_block_fp32_scales", "mxfp8", "nvfp4_plain", "nvfp4_2d"])
@pytest.mark.parametrize("tokens", [256, 37])
def test_what_the_kernel_is_given_is_what_the_recipe_says(
    name: str, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(F, "scaled_mm", kernel_around(F.scaled_mm))
    recipe = BUILTIN_RECIPES["nvfp4_plain"].model_copy(update={"weight_2d": True})
    recipe = BUILTIN_RECIPES.get(name, recipe)
    torch.manual_seed(0)
    x, weight, grad = torch.randn(tokens, 160), torch.randn(320, 160) * 0.05, torch.randn(tokens, 320) * 1e-3
    operands = {"fprop": (x, weight), "dgrad": (grad, weight), "wgrad": (grad, x)}
    plan = LayerPlan.uniform(recipe)
    steps = compile_plan(plan, torch.float32, "cuda", dict.fromkeys(GEMMS, blocked_multiply))
    wanted = reference_gemms(x, weight, grad, plan)
    for gemm in GEMMS:
        step = getattr(steps, gemm)
        assert step.axes == CONTRACTION[gemm]
        a, b = (
            quantize(value, spec, operand=operand, state=QuantizerState())
            for value, spec, operand in zip(operands[gemm], (step.first, step.second), GEMM_OPERANDS[gemm], strict=True)
        )
        found = step.multiply(a, b, step, torch.float32)
        assert found.shape == wanted[gemm].shape
        assert (found - wanted[gemm]).norm() / wanted[gemm].norm() < 2.5e-3, gemm  # bfloat16 output
        with monkeypatch.context() as patch:  # what a compiled graph calls is given bytes, and shapes alone when traced
            patch.setattr(torch.compiler, "is_compiling", lambda: True)
            assert torch.equal(step.multiply(a, b, step, torch.float32), found)
    codes = torch.empty(32, 64, dtype=torch.uint8, device="meta")
    shape = torch.ops.autoprec.blocked_mm(codes, codes[:16], [codes], [codes], "BlockWise1x32", "BlockWise1x32").shape
    assert shape == (32, 16)


def kernel_around(real):
    """``kernel`` with the real function for its meta check."""

    def run(*args, **options):
        F.scaled_mm, fake = real, F.scaled_mm
        try:
            return kernel(*args, **options)
        finally:
            F.scaled_mm = fake

    return run


def test_tiles_are_those_of_cublas() -> None:
    scales = torch.arange(200 * 9, dtype=torch.int32).remainder(251).to(torch.uint8).reshape(200, 9)
    flat = tiled(scales)
    assert flat.numel() == 256 * 12
    assert torch.equal(untiled(flat, 200, 9), scales)


def test_without_a_kernel_for_row_scales_a_cpu_scales_the_product(monkeypatch: pytest.MonkeyPatch) -> None:
    from autoprec.backends import scaled_mm

    monkeypatch.setattr(scaled_mm, "_ROWS_ON_CPU", False)
    real, scales = torch._scaled_mm, []

    def multiply(*args: Any, **options: Any) -> torch.Tensor:
        scales.append(options["scale_a"].numel())
        return real(*args, **options)

    monkeypatch.setattr(torch, "_scaled_mm", multiply)
    plan = LayerPlan.uniform(BUILTIN_RECIPES["fp8_rowwise"])
    step = compile_plan(plan, torch.float32, "cpu", dict.fromkeys(GEMMS, scaled_multiply)).fprop
    torch.manual_seed(0)
    x, weight = torch.randn(21, 48), torch.randn(64, 48)
    out = step.multiply(quantize(x, step.first), quantize(weight, step.second), step, torch.float32)
    wanted = reference_gemms(x, weight, torch.randn(21, 64), plan)["fprop"]
    assert scales == [1]
    assert (out - wanted).norm() / wanted.norm() < 1e-5


def test_a_graph_compiled_for_a_cpu_which_holds_values_multiplies_them() -> None:
    plan = LayerPlan.uniform(BUILTIN_RECIPES["fp8_rowwise"])
    step = compile_plan(plan, torch.bfloat16, "cpu", dict.fromkeys(GEMMS, scaled_multiply)).fprop
    torch.manual_seed(0)
    x, weight = torch.randn(32, 64), torch.randn(48, 64)

    def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return step.multiply(quantize(x, step.first), quantize(weight, step.second), step, torch.bfloat16)

    torch._dynamo.reset()
    found = torch.compile(product, backend="aot_eager", fullgraph=True)(x, weight)
    assert (found - product(x, weight)).norm() / found.norm() < 4e-3


@pytest.mark.parametrize(("name", "old"), [("fp8_tensorwise", False), ("fp8_rowwise", False), ("fp8_rowwise", True)])
def test_ragged_sizes_are_padded_on_a_gpu(name: str, old: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from autoprec.backends import scaled_mm

    if name == "fp8_rowwise" and not old and not scaled_mm._ROWS_ON_CPU:
        pytest.skip("the CPU's kernel of this torch, which stands in for a GPU's, has tensor scales alone")
    monkeypatch.setattr(scaled_mm, "_SLOW_ROWS", old)
    shapes = []
    real = torch._scaled_mm

    def multiply(left, right, **options):
        assert (options["scale_a"].numel() == 1) is (old or name == "fp8_tensorwise")
        shapes.append((*left.shape, *right.shape))
        return real(left, right, **options)

    monkeypatch.setattr(torch, "_scaled_mm", multiply)
    monkeypatch.setattr(scaled_mm, "_is_cuda", lambda tensor: True)
    plan = LayerPlan.uniform(BUILTIN_RECIPES[name])
    steps = compile_plan(plan, torch.float32, "cpu", dict.fromkeys(GEMMS, scaled_multiply))
    torch.manual_seed(0)
    grad, x = torch.randn(21, 64) * 1e-3, torch.randn(21, 48)
    step = steps.wgrad
    out = step.multiply(
        quantize(grad, step.first, operand="grad_output"), quantize(x, step.second), step, torch.float32
    )
    wanted = reference_gemms(x, torch.randn(64, 48), grad, plan)["wgrad"]
    assert shapes == [(64, 32, 32, 48)]
    assert (out - wanted).norm() / wanted.norm() < 2.5e-3
