"""A stand-in for Transformer Engine that keeps its state machine, and computes what its quantizers say in float32.

It is for decisions that need no TE; ``te_scenarios`` runs TE's own Python where it is at hand. What it reproduces of
TE 2.20: quantizers of a live module are rebuilt only when the recipe's class, or a CustomRecipe's factory, changes;
DelayedScaling buffers are keyed by the recipe's repr, which leaves out the amax algorithm; global buffers live until
reset, and a module registers once; unknown arguments of recipes are dropped.
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
        for part in (rowwise_quantizer, columnwise_quantizer):
            assert not isinstance(part, DelayedScalingRequest), "delayed scaling cannot be a part of a hybrid"
        super().__init__(row=rowwise_quantizer, column=columnwise_quantizer)


class Format(enum.Enum):
    E4M3 = "e4m3"
    HYBRID = "hybrid"


@dataclass
class QParams:
    power_2_scale: bool = False
    amax_epsilon: float = 0.0


@dataclass
class MMParams:
    use_split_accumulator: bool = True


@dataclass(frozen=True)
class DelayedScalingRequest:
    fp8_format: Format = Format.HYBRID
    margin: int = 0
    amax_history_len: int = 1024
    amax_compute_algo: str = "max"
    options: ClassVar[dict] = {}


class DelayedScaling:
    def __init__(
        self,
        margin=0,
        fp8_format=Format.HYBRID,
        amax_history_len=1024,
        amax_compute_algo="max",
        fp8_dpa=False,
        **_dropped,
    ):
        self.margin, self.fp8_format, self.fp8_dpa = margin, fp8_format, fp8_dpa
        self.amax_history_len, self.amax_compute_algo = amax_history_len, amax_compute_algo

    def _make_repr(self) -> str:
        return f"margin={self.margin}, format={self.fp8_format.name}, amax_history_len={self.amax_history_len}"

    def __repr__(self) -> str:
        return self._make_repr()


class Float8CurrentScaling:
    def __init__(self, fp8_format=Format.HYBRID, **_dropped):
        self.fp8_format = fp8_format
        self.fp8_quant_fwd_inp = self.fp8_quant_fwd_weight = self.fp8_quant_bwd_grad = QParams()


class Float8BlockScaling(Float8CurrentScaling):
    pass


class MXFP8BlockScaling:
    def __init__(self, fp8_format=Format.E4M3, **_dropped):
        self.fp8_format = fp8_format


class CustomRecipe:
    def __init__(self, qfactory) -> None:
        self.qfactory = qfactory


@dataclass(frozen=True)
class Role:
    module_type: str
    tensor_type: str
    name: str


class TransformerEngineBaseModule(nn.Module):
    pass


class FP8GlobalStateManager:
    resets = 0
    buffers: ClassVar[dict] = {}

    @classmethod
    def reset(cls) -> None:
        cls.resets += 1
        cls.buffers = {}

    @staticmethod
    def get_buffer_info() -> str:
        return "buffer"

    @staticmethod
    def is_fp8_enabled() -> bool:
        return bool(STACK) and STACK[-1] is not None

    @staticmethod
    def get_fp8_recipe():
        return STACK[-1]

    @staticmethod
    def is_first_fp8_module() -> bool:
        return False

    @staticmethod
    def reduce_and_update_fp8_tensors(forward=True) -> None:
        UPDATES.append(forward)


STACK: list = []
UPDATES: list = []


@contextlib.contextmanager
def autocast(enabled=True, recipe=None):
    STACK.append(recipe if enabled else None)
    try:
        yield
    finally:
        STACK.pop()
        if not STACK and enabled and torch.is_grad_enabled():
            FP8GlobalStateManager.reduce_and_update_fp8_tensors(forward=True)


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
    if isinstance(first, DelayedScalingRequest):
        return BUILTIN_RECIPES["fp8_tensorwise"]
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


class Linear(TransformerEngineBaseModule):
    built: ClassVar[list] = []

    def __init__(self, in_features, out_features, bias=True, params_dtype=None, device="cuda", name=None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features, dtype=params_dtype, device=device))
        self.name, self.recipe, self.quantizers, self.fp8_meta = name, None, {}, {}
        Linear.built.append(self)

    def forward(self, x):
        recipe = STACK[-1] if STACK else None
        assert recipe is not None, "called outside of autocast"
        assert x.shape[0] % 8 == 0, "tokens must be a multiple of 8"
        same = self.recipe is not None and type(recipe) is type(self.recipe)
        if same and isinstance(recipe, CustomRecipe):
            same = recipe.qfactory is self.recipe.qfactory
        if not same:  # a changed recipe of the same class is ignored, as in TE issue 3157
            self.recipe = recipe
            if isinstance(recipe, CustomRecipe):
                self.quantizers = {
                    o: recipe.qfactory(Role("linear", o, self.name)) for o in ("input", "weight", "grad_output")
                }
                recipe.qfactory(None)
            else:
                hybrid = recipe.fp8_format is Format.HYBRID
                e4, e5 = DType.kFloat8E4M3, DType.kFloat8E5M2
                self.quantizers = {
                    o: Float8CurrentScalingQuantizer(fp8_dtype=e5 if hybrid and o == "grad_output" else e4)
                    for o in ("input", "weight", "grad_output")
                }
            assert None not in self.quantizers.values()
        if isinstance(recipe, DelayedScaling) and "buffer" not in self.fp8_meta:
            self.fp8_meta["buffer"] = repr(recipe)
            FP8GlobalStateManager.buffers.setdefault(repr(recipe), []).append(self.name)
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
        "DelayedScalingRequest",
    ):
        setattr(te, name, getattr(here, name))
    for name in ("Float8CurrentScalingQuantizer", "Float8BlockQuantizer", "MXFP8Quantizer", "NVFP4Quantizer"):
        setattr(te, name, getattr(here, name))
    for check in ("is_fp8_available", "is_fp8_block_scaling_available"):
        setattr(te, check, lambda return_reason=False: (True, ""))
    for check in ("is_mxfp8_available", "is_nvfp4_available"):
        setattr(te, check, lambda return_reason=False: (False, "compute capability 10.0 is needed"))
    recipes = types.ModuleType("transformer_engine.common.recipe")
    for name in ("DelayedScaling", "Float8CurrentScaling", "Float8BlockScaling", "MXFP8BlockScaling", "CustomRecipe"):
        setattr(recipes, name, getattr(here, name))
    recipes.Format, recipes.QParams, recipes.MMParams = Format, QParams, MMParams
    state = types.ModuleType("transformer_engine.pytorch.quantization")
    state.FP8GlobalStateManager = FP8GlobalStateManager
    base = types.ModuleType("transformer_engine.pytorch.module.base")
    base.TransformerEngineBaseModule = TransformerEngineBaseModule
    root, common = types.ModuleType("transformer_engine"), types.ModuleType("transformer_engine.common")
    for module in (root, common, te, recipes, state, base):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr("autoprec.support.optional.installed_version", lambda name: version)
    monkeypatch.setattr("autoprec.backends.transformer_engine.installed_version", lambda name: version)
    FP8GlobalStateManager.resets, FP8GlobalStateManager.buffers, Linear.built = 0, {}, []
    STACK.clear()
    UPDATES.clear()
    return te


assert set(GEMMS) == set(CONTRACTION)
