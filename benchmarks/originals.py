"""Every quantity that AutoPrec takes from elsewhere, next to its original, and whether the bits are equal.

    python benchmarks/originals.py [--markdown]

Originals that are packages are called (torch, torchao; ml_dtypes where it is installed: ``pip install ml_dtypes``);
of those that need a GPU or their own torch the formula is transcribed, its place named in the row. A row says how many
values were compared and is one of: bit-equal; within the original's own rounding (the limit and the largest difference
are given); or different, with the reason. The exit code is 1 where a row is different without a reason.
"""

from __future__ import annotations

import argparse
import copy
import importlib.metadata
import importlib.util
import math
import platform
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoprec.applying.policy import Policy
from autoprec.numerics.grouped import encode_e8m0, hadamard
from autoprec.numerics.linear import LinearExecution
from autoprec.numerics.quantize import dequantize, quantize, spec_of
from autoprec.numerics.rounding import encode, round_e2m1
from autoprec.numerics.scaling import DelayedScale, scale_of
from autoprec.optim.codecs import CODECS
from autoprec.optim.loss_scaling import LossScaler
from autoprec.optim.optimizer import wrap_optimizer
from autoprec.policy import LayerPlan, OptimizerPolicy
from autoprec.precision.recipes import BUILTIN_RECIPES, Recipe

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
DTYPES = {"e4m3": E4M3, "e5m2": E5M2}


@dataclass(frozen=True)
class Row:
    """One comparison; ``limit`` is the original's own rounding, 0 where bits must be equal."""

    quantity: str
    original: str
    ours: Tensor
    theirs: Tensor
    limit: float = 0.0
    reason: str = ""

    @property
    def difference(self) -> float:
        """Largest difference, relative to the original's largest value; NaN counts as equal to NaN."""
        ours, theirs = self.ours.double().nan_to_num(nan=-1.0), self.theirs.double().nan_to_num(nan=-1.0)
        if torch.equal(ours, theirs):
            return 0.0
        finite = (ours - theirs).abs()
        return float(finite.max() / theirs.abs().max().clamp_min(1e-300))

    @property
    def verdict(self) -> str:
        """What the table says."""
        if self.difference == 0.0:
            return "bit-equal"
        if self.difference <= self.limit:
            return "within rounding"
        return "differs, see reason" if self.reason and not self.limit else "DIFFERENT"


Comparison = Callable[[], Iterator[Row]]
COMPARISONS: list[Comparison] = []


def comparison(function: Comparison) -> Comparison:
    """Add a comparison to the table."""
    COMPARISONS.append(function)
    return function


def version(package: str) -> str:
    """Return ``name version`` as installed."""
    return f"{package} {importlib.metadata.version(package).split('+')[0]}"


def wide(count: int, seed: int = 3) -> Tensor:
    """Return ``[count / 128, 128]`` float32 over 30 orders of magnitude, with zeros and subnormals in it."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, generator=generator) * torch.exp(torch.randn(count, generator=generator) * 6)
    x[::997], x[5::4999] = 0.0, 1e-41
    return x.reshape(-1, 128)


def normal(*shape: int, seed: int = 0) -> Tensor:
    """Return standard normal float32 values."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def fp8(granularity: str, form: str = "e4m3", **scaling: Any) -> Recipe:
    """Return an FP8 recipe whose input has a format."""
    operands = {"input": form, "weight": "e4m3", "grad_output": "e4m3"}
    return Recipe.model_validate(
        {"format": "fp8", "scaling": {"granularity": granularity, **scaling}, "operands": operands}
    )


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
            recipe = fp8("block", power_of_2=power, amax_epsilon=1e-4)
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


# --- optimizers and loss scaling --------------------------------------------------------------------------------------
@comparison
def optimizers() -> Iterator[Row]:
    makers: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
        "AdamW": lambda p: torch.optim.AdamW(p, 1e-2, foreach=False),
        "Adam, L2": lambda p: torch.optim.Adam(p, 1e-2, weight_decay=0.1, foreach=False),
    }
    for name, make in makers.items():
        weights = []
        for wrapped in (True, False):
            weight = nn.Parameter(normal(32, 48))
            optimizer = make([weight])
            if wrapped:  # lossless storage would not be wrapped: gradients stored in bf16 that are bf16 already
                wrap_optimizer(optimizer, OptimizerPolicy(gradients="bf16"))
            for step in range(20):
                weight.grad = normal(32, 48, seed=step).bfloat16().float()
                optimizer.step()
            weights.append(weight.detach().clone())
        yield Row(f"{name}, 20 steps", version("torch"), weights[0], weights[1])


@comparison
def stored_state() -> Iterator[Row]:
    from torchao.optim import quant_utils
    from torchao.optim.subclass_fp8 import quantize_fp8

    for key, signed in ((("exp_avg_sq", "int8_block"), False), (("exp_avg", "int8_block"), True)):
        table = torch.tensor(quant_utils.create_dynamic_map(signed))
        x = normal(64, 256)
        x = x if signed else x.square()
        x[:, 0] = x.abs().amax(1) * 1.5
        theirs_in, scale = quant_utils.scale_tensor(x.reshape(-1), 256)
        codes = quant_utils.quantize_8bit_with_qmap(theirs_in, table)
        theirs = quant_utils.dequant_with_qmap(codes, table, scale).view(x.shape)
        how = CODECS[key]
        kind = "signed" if signed else "unsigned"
        yield Row(
            f"8-bit dynamic map, {kind}, blocks of 256",
            version("torchao"),
            how.decode(how.encode(x), x.shape),
            theirs,
            0.0085,
            "one code at the edge of a decade; a second moment is never 0",
        )
        values = how.decode(how.encode(table.repeat(1).view(1, 256)), torch.Size([1, 256]))
        keep = table != 0
        yield Row(
            f"its 256 values, {kind}",
            f"{version('torchao')} (bitsandbytes' map)",
            values[0][keep],
            table[keep],
            2.0**-22,
            "float32 means of float32 bounds",
        )
    x = normal(64, 256) * torch.exp(normal(64, 1, seed=4) * 4)
    codes, scale = quantize_fp8(x, 128)
    theirs = (codes.float().view(-1, 128) * scale.view(-1, 1)).view(x.shape)
    how = CODECS["exp_avg", "e4m3"]
    yield Row(
        "E4M3 first moment, exact scale",
        f"{version('torchao')} AdamWFp8, blocks of 128",
        how.decode(how.encode(x), x.shape),
        theirs,
        2.0**-4,
        "our scale has 20 bits, so that a resumed run repeats its codes",
    )


@comparison
def msamp() -> Iterator[Row]:
    """MS-AMP 0.4 ``common/tensor/meta.py``: ``2 ** floor(log2(max / amax))``, one scale per tensor."""
    for key, dtype in (
        (("exp_avg", "e4m3_tensor"), E4M3),
        (("exp_avg_sq", "fp16_tensor"), torch.float16),
        (("weights", "fp16_scaled"), torch.float16),
        (("gradients", "e4m3_tensor"), E4M3),
    ):
        x = normal(128, 128, seed=6) * 3e-5
        x = x.square() if key[0] == "exp_avg_sq" else x
        scale = 2.0 ** math.floor(math.log2(torch.finfo(dtype).max / x.abs().max().item()))
        how = CODECS[key]
        yield Row(
            f"{key[0]}: {key[1]}",
            "MS-AMP 0.4 common/tensor/meta.py, transcribed",
            how.decode(how.encode(x), x.shape),
            (x * scale).to(dtype).float() / scale,
        )


@comparison
def kahan() -> Iterator[Row]:
    """torchdistx ``optimizers/anyprecision_optimizer.py``: p + compensation, both bfloat16."""
    how = CODECS["weights", "bf16_kahan"]
    exact = normal(64, 64)
    p, lost = exact.bfloat16(), torch.zeros(64, 64, dtype=torch.bfloat16)
    lost = (exact - p.float()).bfloat16()
    parts = how.encode(exact)
    for step in range(50):
        delta = normal(64, 64, seed=step) * 1e-3
        lost = (lost.float() + delta).bfloat16()
        before = p.clone()
        p = (p.float() + lost.float()).bfloat16()
        lost = (lost.float() + (before.float() - p.float())).bfloat16()
        parts = how.encode(how.exact(parts, exact.shape) + delta)
    yield Row(
        "Kahan weights after 50 updates",
        "torchdistx 0.2 AnyPrecisionAdamW, transcribed",
        how.decode(parts, exact.shape),
        p.float(),
        2.0**-8,
        "the original rounds the update to bfloat16 before it is added, ours after",
    )


class Half(nn.Module):
    """A layer whose gradient passes through FP16, and a loss of its own beside the logits."""

    def __init__(self, returns: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.linear, self.returns = nn.Linear(16, 16), returns

    def forward(self, x: Tensor) -> Any:
        logits = self.linear(x).half().float()
        return self.returns(logits.square().mean(), logits)


@dataclass
class Output:
    """A model output as Hugging Face's."""

    loss: Tensor
    logits: Tensor


@comparison
def loss_scaling() -> Iterator[Row]:
    shapes: dict[str, tuple[Callable[..., Any], Callable[[Any], tuple[Tensor, Tensor]]]] = {
        "a tensor": (lambda _loss, logits: logits, lambda o: (o.square().mean(), o)),
        "a tuple": (lambda loss, logits: (loss, logits), lambda o: o),
        "a dict": (lambda loss, logits: {"loss": loss, "logits": logits}, lambda o: (o["loss"], o["logits"])),
        "a dataclass": (Output, lambda o: (o.loss, o.logits)),
        "nested": (lambda loss, logits: [{"a": Output(loss, logits)}, (logits,)], lambda o: (o[0]["a"].loss, o[1][0])),
    }
    for name, (returns, read) in shapes.items():
        torch.manual_seed(0)
        model = Half(returns)

        def gradient(scaler: Any = None, model: Half = model, read: Any = read) -> Tensor:
            model.zero_grad()
            loss, logits = read(model(normal(8, 16)))
            total = (loss + 0.1 * logits.abs().mean()) * 2.0**-18
            (total if scaler is None else scaler.scale(total)).backward()
            assert model.linear.weight.grad is not None
            return model.linear.weight.grad / (1.0 if scaler is None else scaler.get_scale())

        theirs = gradient(torch.amp.GradScaler("cpu"))
        assert LossScaler.install(model, []).active
        ours = gradient()
        yield Row(f"dynamic scaling, the model returns {name}", f"{version('torch')} GradScaler", ours, theirs)


@comparison
def loss_scale() -> Iterator[Row]:
    overflows = [step in (0, 1, 7, 30, 31) for step in range(60)]
    weight = nn.Parameter(torch.zeros(4))
    scaler, theirs = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=5), []
    plain = torch.optim.SGD([weight], 0.1)
    for bad in overflows:
        weight.grad = torch.full((4,), float("inf") if bad else 1.0) * scaler.scale(torch.ones(()))
        scaler.step(plain)
        scaler.update()
        theirs.append(scaler.get_scale())
    del scaler
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    installed, ours = LossScaler.install(model, [optimizer], initial_scale=2.0**16, growth_interval=5), []
    for bad in overflows:
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, float("inf") if bad else 1.0)
        optimizer.step()
        ours.append(installed.scale)
    yield Row(
        "loss scale over 60 steps with overflows",
        f"{version('torch')} GradScaler",
        torch.tensor(ours),
        torch.tensor(theirs),
    )


# --- what follows from it ---------------------------------------------------------------------------------------------
def recovers(length: int) -> bool:
    """Say whether a NaN batch under delayed scaling leaves the next step the scale it would have had."""
    plan = {"format": "fp8", "scaling": {"granularity": "tensor", "scale": "delayed", "amax_history_len": length}}
    seen = []
    for bad in (False, True):
        layer, weight = LinearExecution(LayerPlan.uniform(Recipe.model_validate(plan))), nn.Parameter(normal(16, 32))
        for step in range(5):
            if step == 3 and bad:
                layer(torch.full((8, 32), math.nan, requires_grad=True), weight, None).sum().backward()
            layer(normal(8, 32, seed=step).requires_grad_(), weight, None).sum().backward()
        seen.append([float(layer.state(weight.device)[f"fprop.{name}.scale"]) for name in ("input", "weight")])
    return seen[0] == seen[1]


def resumes(recipe: str) -> bool:
    """Say whether a run that is saved and resumed half-way has the losses of one that is not."""

    def start() -> tuple[nn.Linear, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Linear(32, 32)
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)
        policy = Policy(recipes={"r": BUILTIN_RECIPES[recipe]}, default="r")
        policy.apply(model)
        return model, policy.wrap_optimizer(optimizer, model)

    def steps(model: nn.Linear, optimizer: torch.optim.Optimizer, first: int, last: int) -> list[float]:
        losses = []
        for step in range(first, last):
            x = normal(16, 32, seed=step) * (1 + step % 3)
            loss = (model(x) - x.roll(1)).square().mean()
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            losses.append(float(loss))
        return losses

    model, optimizer = start()
    steps(model, optimizer, 0, 10)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    resumed, other = start()
    resumed.load_state_dict(saved[0])
    other.load_state_dict(saved[1])
    return steps(model, optimizer, 10, 20) == steps(resumed, other, 10, 20)


def figures() -> Iterator[str]:
    """Yield what users notice of it, one line each."""
    lengths = (1, 2, 16, 64, 256, 1024)
    at_once = sum(map(recovers, lengths))
    yield f"NaN batch under delayed scaling: {at_once} of {len(lengths)} histories (1 to 1024) recover at once"
    recipes = [name for name, recipe in BUILTIN_RECIPES.items() if recipe.scaled]
    same = sum(map(resumes, recipes))
    yield f"saved and resumed: losses bit-identical under {same} of {len(recipes)} recipes with scales"


def compare() -> list[Row]:
    """Run every comparison."""
    rows = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for run in COMPARISONS:
            rows += list(run())
    return rows


def main() -> int:
    """Print the table and what it comes to."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    markdown = parser.parse_args().markdown
    torch.set_num_threads(1)
    rows = compare()
    cells = [("quantity", "original", "values", "result", "difference")]
    for row in rows:
        note = (
            "" if row.verdict == "bit-equal" else f"{row.difference:.1e} of {row.limit:.1e}: {row.reason or 'rounding'}"
        )
        cells.append((row.quantity, row.original, str(row.ours.numel()), row.verdict, note))
    widths = [max(len(line[column]) for line in cells) for column in range(5)]
    for number, line in enumerate(cells):
        text = [cell if markdown else cell.ljust(width) for cell, width in zip(line, widths, strict=True)]
        print(("| " + " | ".join(text) + " |") if markdown else "  ".join(text).rstrip())
        if markdown and number == 0:
            print("|---|---|---:|---|---|")
    equal = sum(row.verdict == "bit-equal" for row in rows)
    within = sum(row.verdict == "within rounding" for row in rows)
    other = len(rows) - equal - within
    print(f"\n{len(rows)} comparisons: {equal} bit-equal, {within} within the original's rounding, {other} different")
    for line in figures():
        print(line)
    print(f"python {platform.python_version()}, {version('torch')}, {version('torchao')}, {platform.machine()}")
    return 1 if any(row.verdict == "DIFFERENT" for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
