"""Formats, scales, operands and layers next to their originals."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoprec import Policy
from autoprec.numerics.grouped import decode_e8m0, encode_e8m0, hadamard
from autoprec.numerics.linear import LinearExecution
from autoprec.numerics.quantize import dequantize, quantize, spec_of
from autoprec.numerics.rounding import encode, round_e2m1
from autoprec.numerics.scaling import DelayedScale, scale_of
from autoprec.policy import LayerPlan
from autoprec.precision.recipes import BUILTIN_RECIPES, Recipe
from benchmarks.numerics.originals_rows import DTYPES, E4M3, Row, comparison, fp8, normal, version, wide


# --- formats ----------------------------------------------------------------------------------------------------------
def every_half() -> Tensor:
    """Return every finite bfloat16 value as float32."""
    x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    return x[x.isfinite()]


@comparison
def casts() -> Iterator[Row]:
    for name, dtype in DTYPES.items():
        top = torch.finfo(dtype).max
        x = every_half()
        yield Row(
            f"cast to {name}, saturating",
            version("torch"),
            encode(x, name).float(),
            x.clamp(-top, top).to(dtype).float(),
        )
    if importlib.util.find_spec("ml_dtypes") is None:
        return
    import ml_dtypes
    import numpy as np

    for name, theirs in (("e4m3", ml_dtypes.float8_e4m3fn), ("e5m2", ml_dtypes.float8_e5m2)):
        x = every_half().clamp(-torch.finfo(DTYPES[name]).max, torch.finfo(DTYPES[name]).max)
        expected = torch.from_numpy(x.numpy().astype(theirs).astype(np.float32))
        yield Row(f"cast to {name}", version("ml_dtypes"), encode(x, name).float(), expected)
    x = every_half().clamp(-6, 6)
    expected = torch.from_numpy(x.numpy().astype(ml_dtypes.float4_e2m1fn).astype(np.float32))
    yield Row("cast to e2m1", version("ml_dtypes"), round_e2m1(x), expected)
    codes = torch.arange(256, dtype=torch.uint8)
    expected = torch.from_numpy(codes.numpy().view(ml_dtypes.float8_e8m0fnu).astype(np.float32))
    yield Row("values of E8M0 scales", version("ml_dtypes"), decode_e8m0(codes), expected)


@comparison
def four_bits() -> Iterator[Row]:
    from torchao.prototype.mx_formats.kernels import f4_unpacked_to_f32, f32_to_f4_unpacked

    x = every_half()
    yield Row("cast to e2m1", version("torchao"), round_e2m1(x), f4_unpacked_to_f32(f32_to_f4_unpacked(x)))


# --- scales -----------------------------------------------------------------------------------------------------------
@comparison
def scales() -> Iterator[Row]:
    from torchao.float8.float8_utils import amax_to_scale

    amax = wide(1 << 16, seed=5).abs().reshape(-1)
    amax = amax[(amax > 1e-12) & (amax < 1e30)]
    for name, dtype in DTYPES.items():
        for power in (False, True):
            theirs = amax_to_scale(amax, dtype, round_scales_to_power_of_2=power)
            kind = "power-of-two scale" if power else "scale"
            yield Row(
                f"{kind} of an amax, {name}",
                version("torchao"),
                scale_of(amax, torch.finfo(dtype).max, power_of_2=power),
                theirs,
            )


@comparison
def float8_operands() -> Iterator[Row]:
    from torchao.float8.config import ScalingGranularity
    from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic
    from torchao.float8.float8_training_tensor import LinearMMConfig

    x = wide(1 << 17)
    for form, dtype in DTYPES.items():
        for granularity in ("tensor", "row"):
            for power in (False, True):
                row = granularity == "row"
                theirs = hp_tensor_to_float8_dynamic(
                    x,
                    dtype,
                    LinearMMConfig(),
                    scaling_granularity=ScalingGranularity.AXISWISE if row else ScalingGranularity.TENSORWISE,
                    axiswise_dim=-1 if row else None,
                    round_scales_to_power_of_2=power,
                )
                made = quantize(x, spec_of(fp8(granularity, form, power_of_2=power), "fprop", "input"))
                kind = f"{form} codes, {granularity} scale{', power of two' if power else ''}"
                yield Row(kind, version("torchao"), made.codes.view(torch.uint8), theirs._data.view(torch.uint8))


@comparison
def block_formats() -> Iterator[Row]:
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import MXTensor
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale

    x = wide(1 << 17)
    x[7, 3], x[9, 40] = float("inf"), float("nan")
    for form, dtype in DTYPES.items():
        recipe = Recipe.model_validate({"format": "mxfp8", "operands": {"input": form}})
        theirs = MXTensor.to_mx(x, dtype, 32, ScaleCalculationMode.RCEIL)
        made = quantize(x, spec_of(recipe, "fprop", "input"))
        assert made.groups is not None
        yield Row(
            f"MX {form}: E8M0 scales (rceil)",
            version("torchao"),
            made.groups.flatten(),
            theirs.scale.view(torch.uint8).flatten(),
        )
        yield Row(f"MX {form}: values", version("torchao"), dequantize(made), theirs.dequantize(torch.float32))
    x = wide(1 << 16)
    made = quantize(x, spec_of(BUILTIN_RECIPES["nvfp4_plain"], "fprop", "input"))
    theirs = NVFP4Tensor.to_nvfp4(x, per_tensor_scale=per_tensor_amax_to_scale(x.abs().max()))
    yield Row("NVFP4 values, two-level scales", version("torchao"), dequantize(made), theirs.dequantize(torch.float32))
    x = normal(64, 256)
    x[::2] *= 1e-5  # groups whose scale would lie below E4M3's smallest normal value
    made = quantize(x, spec_of(BUILTIN_RECIPES["nvfp4_plain"], "fprop", "input"))
    theirs = NVFP4Tensor.to_nvfp4(x, per_tensor_scale=per_tensor_amax_to_scale(x.abs().max()))
    yield Row("NVFP4 values, tiny groups", version("torchao"), dequantize(made), theirs.dequantize(torch.float32))
    amax = torch.exp2(normal(4096) * 20).abs()
    expected = torch.ceil(torch.log2(amax.double() / 448.0)).clamp(-127, 127) + 127
    yield Row("E8M0 scale of an amax", "OCP MX 1.0, section 6.3, rounded up", encode_e8m0(amax, 448.0), expected)


@comparison
def integers() -> Iterator[Row]:
    from torchao.prototype.quantized_training.int8 import quantize_int8_rowwise

    x = normal(256, 384)
    codes, scale = quantize_int8_rowwise(x)
    made = quantize(x, spec_of(BUILTIN_RECIPES["int8"], "fprop", "input"))
    yield Row("int8 codes, row scale", version("torchao"), made.codes, codes)
    yield Row("int8 row scales", version("torchao"), made.scale.reshape(-1), scale.reshape(-1), 2.0**-23)


@comparison
def deepseek() -> Iterator[Row]:
    """DeepGEMM ``testing/numeric.py`` and ``utils/math.py``: per_token_cast_to_fp8, per_block_cast_to_fp8."""
    x = normal(256, 512) * torch.exp(normal(256, 1, seed=1) * 3)
    x[:128, :128] *= 1e-9  # tiny blocks, whose amax is clamped
    tiles = x.view(256, 4, 128)
    for power in (False, True):
        for kind, view, dims in (
            ("1x128 tiles", tiles, (2,)),
            ("128x128 blocks", x.view(2, 128, 4, 128), (1, 3)),
        ):
            amax = view.abs().float().amax(dims, keepdim=True).clamp(1e-4)
            inverse = amax / 448.0
            if power:
                inverse = torch.exp2(torch.ceil(torch.log2(inverse)))
            theirs = (view * (1.0 / inverse)).to(E4M3).float() * inverse
            recipe = BUILTIN_RECIPES["fp8_block_fp32_scales"]
            recipe = fp8("block", power_of_2=True, amax_epsilon=1e-4) if power else recipe
            operand = "input" if kind.startswith("1x") else "weight"
            ours = dequantize(quantize(x, spec_of(recipe, "fprop", operand), operand=operand))
            label = f"E4M3, {kind}, {'power-of-two' if power else 'float32'} scales"
            yield Row(
                label,
                "DeepGEMM utils/math.py, transcribed",
                ours,
                theirs.reshape(x.shape),
                0.0 if power else 2.0**-4,
                "scale and inverse are each rounded: a value half-way may fall to either side",
            )


@comparison
def delayed() -> Iterator[Row]:
    """Transformer Engine ``common/recipe/delayed_scaling.cu`` and ``quantization.py`` (_default_sf_compute)."""
    amaxes = torch.exp2(normal(200, seed=9) * 4).tolist()
    amaxes[40] = 0.0
    for length, algorithm, margin in ((1, "max", 0), (16, "max", 0), (16, "max", 2), (64, "most_recent", 0)):
        ours, theirs = DelayedScale(448.0, length=length, algorithm=algorithm, margin=margin), []
        history, scale, found = [0.0] * length, torch.tensor(1.0), []
        for amax in amaxes:
            found.append(float(ours.step(torch.tensor(amax), update=True)))
            ours.roll()  # each is a step of the optimizer
            theirs.append(float(scale))
            if amax:
                history = [amax, *history[:-1]]
            used = torch.tensor(history[0] if algorithm == "most_recent" else max(history))
            scale = torch.div(torch.tensor(448.0), used) / 2**margin if used > 0 else scale
        name = f"delayed scale, history {length}, {algorithm}, margin {margin}, after the first step"
        yield Row(
            name,
            "Transformer Engine 2.20 delayed_scaling.cu, transcribed",
            torch.tensor(found[1:]),
            torch.tensor(theirs[1:]),
        )


@comparison
def transform() -> Iterator[Row]:
    """Transformer Engine ``custom_recipes/quantization_ref_nvfp4.py``: Sylvester matrix times fixed signs, over 4."""
    x = normal(64, 32)
    h = torch.tensor([[1.0]])
    for _ in range(4):
        h = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]]), h)
    signs = torch.tensor([1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1.0])
    theirs = torch.cat([(h * signs / 4.0) @ part for part in x.split(16)])
    yield Row(
        "16 x 16 Hadamard transform of wgrad operands",
        "Transformer Engine 2.20 NVFP4 reference, transcribed",
        hadamard(x),
        theirs,
        2.0**-22,
        "order of summation",
    )


# --- layers -----------------------------------------------------------------------------------------------------------
def passes(run: Callable[[Tensor], Tensor], module: nn.Linear) -> list[Tensor]:
    """Return output, input gradient and weight gradient of one step."""
    module.zero_grad()
    x = normal(64, 96, seed=1).requires_grad_()
    out = run(x)
    out.backward(normal(64, 128, seed=2) * 1e-3)
    assert x.grad is not None
    assert module.weight.grad is not None
    return [out.detach(), x.grad, module.weight.grad.clone()]


@comparison
def linear_layers() -> Iterator[Row]:
    from torchao.float8 import Float8LinearConfig
    from torchao.float8.float8_linear import Float8Linear

    torch.manual_seed(0)
    for name, recipe in (("tensorwise", "fp8_tensorwise"), ("rowwise", "fp8_rowwise")):
        module = nn.Linear(96, 128, bias=False)
        config = Float8LinearConfig.from_recipe_name(name)
        object.__setattr__(config, "emulate", True)
        theirs = passes(Float8Linear.from_float(module, config=config), module)
        layer = LinearExecution(LayerPlan.uniform(BUILTIN_RECIPES[recipe]))
        ours = passes(lambda x, layer=layer, module=module: layer(x, module.weight, None), module)
        for gemm, a, b in zip(("fprop", "dgrad", "wgrad"), ours, theirs, strict=True):
            yield Row(
                f"FP8 linear layer, {name}, {gemm}",
                f"{version('torchao')} Float8Linear, emulated",
                a,
                b,
                2.0**-8,
                "the product is rounded to bfloat16, as a GPU's is",
            )
    module = nn.Linear(96, 128, bias=False)
    layer = LinearExecution(LayerPlan.uniform(BUILTIN_RECIPES["bf16"]))
    ours = passes(lambda x: layer(x, module.weight, None), module)

    def autocast(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return F.linear(x, module.weight).float()

    for gemm, a, b in zip(("fprop", "dgrad", "wgrad"), ours, passes(autocast, module), strict=True):
        yield Row(f"bf16 linear layer, {gemm}", f"{version('torch')} autocast", a, b)


@comparison
def layers_of_one_dtype() -> Iterator[Row]:
    """Convolutions next to autocast's, recurrent layers and cells next to a copy of the module in bfloat16."""

    def autocast(module: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            out: Tensor = module(x)
        return out.float()

    def cast(module: nn.Module, x: Tensor) -> Tensor:
        weights = {name: weight.bfloat16() for name, weight in module.named_parameters()}
        if isinstance(module, nn.RNNBase):  # its flat list is what the kernel gets, which functional_call leaves alone
            module._flat_weights, held = [weights[name] for name in module._flat_weights_names], module._flat_weights
            try:
                return module(x.bfloat16())[0].float()  # type: ignore[no-any-return]
            finally:
                module._flat_weights = held
        return first(torch.func.functional_call(module, weights, (x.bfloat16(),))).float()

    def first(out: Tensor | tuple[Tensor, ...]) -> Tensor:
        return out[0] if isinstance(out, tuple) else out

    torch.manual_seed(0)
    makers: dict[str, tuple[nn.Module, Tensor, str]] = {
        "convolution": (nn.Conv2d(8, 16, 3, padding=1), normal(2, 8, 12, 12), "autocast"),
        "LSTM": (nn.LSTM(24, 32), normal(6, 4, 24), "bfloat16 weights"),
        "GRU": (nn.GRU(24, 32), normal(6, 4, 24), "bfloat16 weights"),
        "LSTM cell": (nn.LSTMCell(24, 32), normal(8, 24), "bfloat16 weights"),
    }
    for name, (module, x, how) in makers.items():
        seen: list[list[Tensor]] = []
        for ours in (False, True):
            model = nn.Sequential(module)
            if ours:
                Policy(recipes={"bf16": BUILTIN_RECIPES["bf16"]}, default="bf16").apply(model)
            given = x.clone().requires_grad_()
            out = first(module(given)) if ours else (autocast if how == "autocast" else cast)(module, given)
            out.square().sum().backward()  # type: ignore[no-untyped-call]
            weight = next(module.parameters())
            if given.grad is None or weight.grad is None:
                raise RuntimeError(f"{name}: no gradient")
            seen.append([out.detach(), given.grad, weight.grad])
            module.zero_grad()
        for what, theirs, mine in zip(("output", "input gradient", "weight gradient"), *seen, strict=True):
            yield Row(f"bf16 {name}, {what}", f"{version('torch')} {how}", mine, theirs)
