"""The emulated product against exact sums and against torch's own 8-bit GEMMs."""

from __future__ import annotations

import pytest
import torch

from autoprec.numerics.gemm import CHUNK, contract, emulated_multiply, fast_bf16_gemm, limited_matmul, product_dtype
from autoprec.numerics.operand import CONTRACTION, Spec
from autoprec.numerics.quantize import dequantize, quantize, spec_of
from autoprec.precision.recipes import BUILTIN_RECIPES, GEMM_OPERANDS, GEMMS

DETERMINISTIC = [n for n, r in BUILTIN_RECIPES.items() if not r.stochastic_rounding]
SHAPES = {"fprop": ((64, 128), (96, 128)), "dgrad": ((64, 96), (96, 128)), "wgrad": ((64, 96), (64, 128))}


def operands(name: str, gemm: str):
    generator = torch.Generator().manual_seed(0)
    for shape, operand in zip(SHAPES[gemm], GEMM_OPERANDS[gemm], strict=True):
        x = torch.randn(shape, generator=generator)
        yield quantize(x, spec_of(BUILTIN_RECIPES[name], gemm, operand), operand=operand)


@pytest.mark.parametrize("name", DETERMINISTIC)
@pytest.mark.parametrize("gemm", GEMMS)
def test_products_are_exact_up_to_output_rounding(name: str, gemm: str) -> None:
    a, b = operands(name, gemm)
    axes = CONTRACTION[gemm]
    exact = contract(dequantize(a).double(), axes[0], dequantize(b).double(), axes[1])
    for product, limit in ((product_dtype(a.spec, b.spec, "cpu"), 2.5e-3), (torch.float32, 1e-6)):
        found = emulated_multiply(a, b, axes, torch.float32, product=product)
        fp16 = 4e-4 if name.startswith("fp16") else limit
        assert (found.double() - exact).norm() / exact.norm() < max(limit, fp16 if product is torch.float32 else 0)


@pytest.mark.parametrize("name", ["fp8_tensorwise_e4m3", "fp8_tensorwise", "fp8_rowwise"])
@pytest.mark.parametrize("gemm", GEMMS)
def test_scaled_mm_agrees_within_output_rounding(name: str, gemm: str) -> None:
    from autoprec.backends.scaled_mm import scaled_multiply
    from autoprec.numerics.plan import compile_plan
    from autoprec.policy import LayerPlan

    a, b = operands(name, gemm)
    step = getattr(compile_plan(LayerPlan.uniform(BUILTIN_RECIPES[name]), torch.float32, "cpu"), gemm)
    theirs = scaled_multiply(a, b, step, torch.float32)
    ours = emulated_multiply(a, b, step.axes, torch.float32, product=step.product)
    assert (ours - theirs).norm() / theirs.norm() < 2.5e-3
    wide = emulated_multiply(a, b, step.axes, torch.float32, product=torch.float32)
    assert (wide - theirs).norm() / theirs.norm() < 1e-5


def test_int8_products_are_exact_integers() -> None:
    a, b = operands("int8", "fprop")
    found = emulated_multiply(a, b, (1, 1), torch.float32, product=torch.float32)
    integers = (a.codes.double() @ b.codes.double().t()) * a.scale.double() * b.scale.double().t()
    assert (found.double() - integers).abs().max() <= 1e-5 * integers.abs().max()


def test_product_dtype_holds_the_values() -> None:
    cast = {name: Spec("cast", name) for name in ("fp64", "fp32", "tf32", "bf16", "fp16")}
    assert product_dtype(cast["fp64"], cast["bf16"], "cpu") is torch.float64
    assert product_dtype(cast["tf32"], cast["tf32"], "cuda") is torch.float32
    assert product_dtype(cast["fp16"], cast["fp16"], "cpu") is torch.float32
    assert product_dtype(cast["fp16"], cast["fp16"], "cuda") is torch.float16
    assert product_dtype(cast["bf16"], cast["bf16"], "cuda") is torch.bfloat16
    block = spec_of(BUILTIN_RECIPES["fp8_block_fp32_scales"], "fprop", "input")
    assert product_dtype(block, block, "cuda") is torch.float32
    assert fast_bf16_gemm("cuda")


def test_fp16_products_overflow_to_infinity() -> None:
    big = quantize(torch.full((4, 4), 300.0), Spec("cast", "fp16"))
    assert emulated_multiply(big, big, (1, 1), torch.float32, product=torch.float32).isinf().all()


def test_a_wide_product_is_one_16_bit_gemm_with_an_fp32_result_on_a_gpu() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils._python_dispatch import TorchDispatchMode

    calls: list[str] = []

    class Calls(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            calls.append(str(func))
            return func(*args, **(kwargs or {}))

    spec = spec_of(BUILTIN_RECIPES["bf16_fp32_output"], "fprop", "input")
    assert product_dtype(spec, spec, "cuda", wide=True) is torch.bfloat16
    assert product_dtype(spec, spec, "cpu", wide=True) is torch.float32
    with FakeTensorMode(), Calls():
        a, b = (torch.empty(32, 64, dtype=torch.bfloat16, device="cuda") for _ in range(2))
        calls.clear()
        out = contract(a, 1, b, 1, wide=True)
    assert (out.dtype, tuple(out.shape)) == (torch.float32, (32, 32))
    assert [call for call in calls if call.startswith("aten.mm")] == ["aten.mm.dtype"]


def test_small_integers_are_exact() -> None:
    a, b = torch.randint(-4, 5, (8, 96)).float(), torch.randint(-4, 5, (96, 8)).float()
    assert torch.equal(limited_matmul(a, b), a @ b)


def test_same_sign_sums_lose_a_bias_that_grows_with_length() -> None:
    generator = torch.Generator().manual_seed(0)
    errors = []
    for length in (CHUNK, 1024, 8192):
        a, b = torch.rand(4, length, generator=generator), torch.rand(length, 4, generator=generator)
        exact = (a.double() @ b.double()).float()
        found = limited_matmul(a, b)
        assert (found <= exact * (1 + 1e-6)).all()
        errors.append(((exact - found) / exact).mean().item())
    assert errors == sorted(errors)
    assert errors[0] < 2e-4 < 2e-3 < errors[-1] < 2e-2


@pytest.mark.parametrize("compiled", [False, True])
def test_a_tf32_product_runs_on_tf32_units_and_no_other_does(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    multiply = torch.mm

    def mm(*operands: torch.Tensor) -> torch.Tensor:
        seen.append(torch.backends.cuda.matmul.fp32_precision)
        return multiply(*operands)

    monkeypatch.setattr(torch, "mm", mm)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: compiled)
    for name in ("tf32", "fp32"):
        spec = Spec("cast", name)
        a, b = (quantize(torch.randn(16, 16), spec) for _ in range(2))
        before = torch.backends.cuda.matmul.fp32_precision
        out = emulated_multiply(a, b, (1, 0), torch.float32, product=torch.float32)
        assert torch.equal(out, multiply(a.codes, b.codes))
        assert torch.backends.cuda.matmul.fp32_precision == before
    assert seen == ["tf32", before]
