"""A stand-in for Transformer Engine that keeps its state machine, and computes what its quantizers say in float32.

It is for decisions that need no TE; ``te_scenarios`` runs TE's own Python where it is at hand. What it reproduces of
TE 2.20: quantizers of a live module are rebuilt only when a CustomRecipe's factory changes.
"""

from __future__ import annotations

import contextlib
import enum
import sys
import types
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from autoprec.numerics.gemm import contract
from autoprec.numerics.operand import CONTRACTION
from autoprec.numerics.quantize import dequantize, quantize, spec_of
from autoprec.precision.recipes import BUILTIN_RECIPES, GEMM_OPERANDS, GEMMS


class DType(enum.IntEnum):
    kFloat8E4M3 = 7  # noqa: N815 - TE's own name
    kFloat8E5M2 = 8  # noqa: N815


class Quantizer:
    def __init__(self, **options) -> None:
        self.options = options


class IdentityQuantizer(Quantizer):
    pass


class Float8CurrentScalingQuantizer(Quantizer):
    pass


class Float8BlockQuantizer(Quantizer):
    pass


class MXFP8Quantizer(Quantizer):
    pass


class NVFP4Quantizer(Quantizer):
    pass


class HybridQuantizer(Quantizer):
    def __init__(self, rowwise_quantizer, columnwise_quantizer) -> None:
        super().__init__(row=rowwise_quantizer, column=columnwise_quantizer)


@dataclass
class MMParams:
    use_split_accumulator: bool = True


class CustomRecipe:
    def __init__(self, qfactory) -> None:
        self.qfactory = qfactory


@dataclass(frozen=True)
class Role:
    module_type: str
    tensor_type: str
    name: str


STACK: list = []


@contextlib.contextmanager
def autocast(enabled=True, recipe=None):
    STACK.append(recipe if enabled else None)
    try:
        yield
    finally:
        STACK.pop()


def _gemm_recipe(quantizers, gemm):
    first, second = (
        quantizers[o].options["row" if gemm == ("fprop", "fprop", "dgrad")[i] else "column"]
        if isinstance(quantizers[o], HybridQuantizer)
        else quantizers[o]
        for o, i in ((operand, ("input", "weight", "grad_output").index(operand)) for operand in GEMM_OPERANDS[gemm])
    )
    assert isinstance(first, IdentityQuantizer) == isinstance(second, IdentityQuantizer), "operands disagree"
    if isinstance(first, IdentityQuantizer):
        assert first.options.get("dtype") == second.options.get("dtype"), "operands of two dtypes"
        return BUILTIN_RECIPES["bf16"]
    if isinstance(first, MXFP8Quantizer):
        return BUILTIN_RECIPES["mxfp8"]
    e5m2 = DType.kFloat8E5M2 in (first.options.get("fp8_dtype"), second.options.get("fp8_dtype"))
    return BUILTIN_RECIPES["fp8_tensorwise" if e5m2 or gemm == "fprop" else "fp8_tensorwise_e4m3"]


class _Run(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, quantizers):
        ctx.save_for_backward(x, weight)
        ctx.quantizers = quantizers
        return _product(x, weight, "fprop", quantizers).to(x.dtype)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return (
            _product(grad, weight, "dgrad", ctx.quantizers).to(x.dtype),
            _product(grad, x, "wgrad", ctx.quantizers).to(weight.dtype),
            None,
        )


def _product(a, b, gemm, quantizers):
    recipe, axes = _gemm_recipe(quantizers, gemm), CONTRACTION[gemm]
    parts = [
        dequantize(quantize(x.bfloat16(), spec_of(recipe, gemm, o), operand=o))
        for x, o in zip((a, b), GEMM_OPERANDS[gemm], strict=True)
    ]
    return contract(parts[0], axes[0], parts[1], axes[1])


class Linear(nn.Module):
    built: ClassVar[list] = []

    def __init__(self, in_features, out_features, bias=True, params_dtype=None, device="cuda", name=None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features, dtype=params_dtype, device=device))
        self.name, self.recipe, self.quantizers = name, None, {}
        Linear.built.append(self)

    def forward(self, x):
        recipe = STACK[-1] if STACK else None
        assert recipe is not None, "called outside of autocast"
        assert x.shape[0] % 8 == 0, "tokens must be a multiple of 8"
        same = self.recipe is not None and type(recipe) is type(self.recipe)
        if not same or recipe.qfactory is not self.recipe.qfactory:  # else ignored, as in TE issue 3157
            self.recipe = recipe
            self.quantizers = {
                o: recipe.qfactory(Role("linear", o, self.name)) for o in ("input", "weight", "grad_output")
            }
            recipe.qfactory(None)
            assert None not in self.quantizers.values()
        return _Run.apply(x, self.weight, self.quantizers)


def install(monkeypatch, version: str = "2.20.2") -> types.ModuleType:
    """Make ``import transformer_engine.pytorch`` find this stand-in, and every GPU check pass."""
    te = types.ModuleType("transformer_engine.pytorch")
    here = sys.modules[__name__]
    for name in (
        "Linear",
        "autocast",
        "DType",
        "IdentityQuantizer",
        "HybridQuantizer",
    ):
        setattr(te, name, getattr(here, name))
    for name in ("Float8CurrentScalingQuantizer", "Float8BlockQuantizer", "MXFP8Quantizer", "NVFP4Quantizer"):
        setattr(te, name, getattr(here, name))
    for check in ("is_fp8_available", "is_fp8_block_scaling_available"):
        setattr(te, check, lambda return_reason=False: (True, ""))
    for check in ("is_mxfp8_available", "is_nvfp4_available"):
        setattr(te, check, lambda return_reason=False: (False, "compute capability 10.0 is needed"))
    recipes = types.ModuleType("transformer_engine.common.recipe")
    recipes.CustomRecipe, recipes.MMParams = CustomRecipe, MMParams
    root, common = types.ModuleType("transformer_engine"), types.ModuleType("transformer_engine.common")
    for module in (root, common, te, recipes):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr("autoprec.support.optional.installed_version", lambda name: version)
    monkeypatch.setattr("autoprec.backends.transformer_engine.installed_version", lambda name: version)
    Linear.built = []
    STACK.clear()
    return te


assert set(GEMMS) == set(CONTRACTION)
