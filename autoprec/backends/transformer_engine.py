"""The ``transformer_engine`` backend: TE's modules around the model's own Parameters, one recipe object per policy.

A ``te.Linear`` built on the meta device is given the layer's Parameters and called from the layer's own forward. It is
no submodule of the model, so names, ``state_dict`` (no ``_extra_state``), optimizer and hooks stay as they are. From TE
2.19 on, one ``CustomRecipe`` whose factory answers per layer and GEMM serves the whole model; before, each layer enters
its own recipe inside the model's. TE ignores a changed recipe of the same class on a live module, so every policy gets
fresh modules and a reset of TE's global state.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from autoprec.backends.base import Capability
from autoprec.backends.library import LibraryExecution, plan_labels
from autoprec.errors import MissingDependencyError, UnsupportedError
from autoprec.optional import installed_version, require
from autoprec.policy import LayerPlan
from autoprec.recipes import GEMM_OPERANDS, GEMMS, Gemm, Operand, Recipe

__all__ = ["QuantizerFactory", "TransformerEngineBackend"]

#: GEMMs that read an operand along its rows and along its columns; see te.Linear's quantizer slots.
SLOT_GEMMS: dict[Operand, tuple[Gemm, Gemm]] = {
    "input": ("fprop", "wgrad"),
    "weight": ("fprop", "dgrad"),
    "grad_output": ("dgrad", "wgrad"),
}
_PURPOSE = "backend 'transformer_engine'"
#: Multiples TE's kernels need of every dimension.
_ALIGNMENT = {"fp8": 16, "mxfp8": 32, "nvfp4": 16}


def _version() -> tuple[int, ...]:
    text = installed_version("transformer_engine") or "0"
    return tuple(int(part) for part in text.split("+")[0].split(".")[:2] if part.isdigit())


def _alignment(plan: LayerPlan) -> int:
    sizes = [1]
    for gemm in GEMMS:
        recipe = plan.recipe(gemm)
        if recipe is not None and recipe.scaled:
            block = recipe.scaling is not None and recipe.scaling.granularity == "block"
            sizes.append(128 if block else _ALIGNMENT[recipe.format])
    return max(sizes)


class QuantizerFactory:
    """Answers Transformer Engine's question "which quantizer for this slot of this layer?" from the policy's plans.

    A fresh object per policy: TE rebuilds quantizers only when the factory is another one.
    """

    def __init__(self, te: Any, device: torch.device) -> None:
        self.te, self.device = te, device
        self.plans: dict[str, LayerPlan] = {}

    def __call__(self, role: Any) -> Any:
        """Return the quantizer of a slot; never None, which TE takes for an error."""
        plan = self.plans.get(getattr(role, "name", "") or "") if role is not None else None
        operand = getattr(role, "tensor_type", "")
        if plan is None or operand not in SLOT_GEMMS:
            return self.te.IdentityQuantizer()
        row, column = (plan.recipe(gemm) for gemm in SLOT_GEMMS[operand])
        if row == column:
            return self._quantizer(row, operand)
        parts = self._quantizer(row, operand), self._quantizer(column, operand)
        return self.te.HybridQuantizer(rowwise_quantizer=parts[0], columnwise_quantizer=parts[1])

    def _quantizer(self, recipe: Recipe | None, operand: Operand) -> Any:
        if recipe is None or not recipe.scaled:
            return self.te.IdentityQuantizer()
        dtype = self._dtype(recipe, operand)
        if recipe.format == "mxfp8":
            return self.te.MXFP8Quantizer(fp8_dtype=dtype)
        if recipe.format == "nvfp4":
            return self.te.NVFP4Quantizer(
                with_rht=recipe.hadamard and operand != "weight",
                stochastic_rounding=recipe.stochastic_rounding and operand == "grad_output",
                with_2d_quantization=recipe.weight_2d and operand == "weight",
            )
        scaling = recipe.scaling
        if scaling is None:
            return self.te.IdentityQuantizer()
        if scaling.scale == "delayed":
            return self.te.DelayedScalingRequest(
                fp8_dtype=dtype,
                margin=scaling.margin,
                amax_history_len=scaling.amax_history_len,
                amax_compute_algo=scaling.amax_compute_algo,
            )
        options = {"force_pow_2_scales": scaling.power_of_2, "amax_epsilon": scaling.amax_epsilon}
        if scaling.granularity == "block":
            return self.te.Float8BlockQuantizer(
                fp8_dtype=dtype,
                rowwise=True,
                columnwise=True,
                block_scaling_dim=2 if operand == "weight" else 1,
                **options,
            )
        return self.te.Float8CurrentScalingQuantizer(fp8_dtype=dtype, device=self.device, **options)

    def _dtype(self, recipe: Recipe, operand: Operand) -> Any:
        return self.te.DType.kFloat8E5M2 if recipe.operand_format(operand) == "e5m2" else self.te.DType.kFloat8E4M3


def _builtin_recipe(module: Any, recipe: Recipe) -> Any:
    """Return TE's own recipe object for a uniform recipe (TE < 2.19).

    Fields are checked against the dataclass first, because TE drops unknown ones silently, and quantisation parameters
    that its constructor ignores are assigned afterwards.
    """
    hybrid = recipe.operands is not None and recipe.operands.grad_output == "e5m2"
    fmt = module.Format.HYBRID if hybrid else module.Format.E4M3
    scaling = recipe.scaling
    if recipe.format == "mxfp8":
        return module.MXFP8BlockScaling(fp8_format=fmt)
    if scaling is None:
        raise UnsupportedError(f"Transformer Engine before 2.19 has no recipe for {recipe.describe()}")
    if scaling.scale == "delayed":
        return _distinct(module.DelayedScaling)(
            margin=scaling.margin,
            fp8_format=fmt,
            amax_history_len=scaling.amax_history_len,
            amax_compute_algo=scaling.amax_compute_algo,
        )
    if scaling.granularity == "block":
        made = module.Float8BlockScaling(fp8_format=fmt)
    else:
        made = module.Float8CurrentScaling(fp8_format=fmt)
    parameters = module.QParams(power_2_scale=scaling.power_of_2, amax_epsilon=scaling.amax_epsilon)
    for slot in ("fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad"):
        setattr(made, slot, parameters)
    return made


def _distinct(base: Any) -> Any:
    """Return ``DelayedScaling`` with a repr that names the amax algorithm.

    TE keys its global amax buffers by the repr, which leaves it out: layers with ``max`` and ``most_recent`` would
    share one buffer and one algorithm.
    """

    class DelayedScaling(base):  # type: ignore[misc]
        def _make_repr(self) -> str:
            return f"{super()._make_repr()}, amax_compute_algo={self.amax_compute_algo}"

        def __repr__(self) -> str:
            return self._make_repr()

    return DelayedScaling


class TransformerEngineBackend:
    """One instance serves one policy on one model."""

    name = "transformer_engine"

    def __init__(self) -> None:
        self._custom: Any = None
        self._factory: QuantizerFactory | None = None
        self._outer: Callable[[], AbstractContextManager[Any]] | None = None

    def available(self, device: str) -> Capability:
        """Say whether Transformer Engine can be imported and the device runs FP8."""
        if not device.startswith("cuda"):
            return Capability(False, f"Transformer Engine needs CUDA, the model is on {device}")
        try:
            te = require("transformer_engine.pytorch", purpose=_PURPOSE)
        except MissingDependencyError as error:
            return Capability(False, error.what)
        ok, reason = te.is_fp8_available(return_reason=True)
        return Capability(bool(ok), reason or f"Transformer Engine {installed_version('transformer_engine')}")

    def capability(self, recipe: Recipe, *, gemm: Gemm, m: int, k: int, n: int, device: str) -> Capability:
        """Say whether Transformer Engine runs one GEMM under a recipe; 0 stands for a size not known yet."""
        del m
        found = self.available(device)
        if not found:
            return found
        if not recipe.scaled:
            ok = recipe.format == "bf16"
            return Capability(ok, "bf16 inside TE" if ok else f"leave {recipe.format} layers to another backend")
        if recipe.format == "int8" or (recipe.scaling is not None and recipe.scaling.granularity == "row"):
            return Capability(False, f"Transformer Engine has no {recipe.describe()} recipe")
        checks = {"mxfp8": "is_mxfp8_available", "nvfp4": "is_nvfp4_available"}
        block = recipe.scaling is not None and recipe.scaling.granularity == "block"
        check = "is_fp8_block_scaling_available" if block else checks.get(recipe.format, "is_fp8_available")
        ok, reason = getattr(require("transformer_engine.pytorch"), check)(return_reason=True)
        if not ok:
            return Capability(False, reason)
        size = 128 if block else _ALIGNMENT[recipe.format]
        for label, value in (("K", k), ("N", n)):
            if value % size:
                return Capability(False, f"{gemm} {label} = {value} is not a multiple of {size}")
        return Capability(True, f"Transformer Engine {recipe.describe()}")

    def bind(self, plan: LayerPlan, module: nn.Module, *, name: str, seed: int) -> LibraryExecution:
        """Return an execution around a fresh ``te.Linear`` that shares the module's Parameters.

        Raises:
            UnsupportedError: a plan this version of Transformer Engine cannot express, or a module that is no Linear.
        """
        del seed
        if not isinstance(module, nn.Linear):
            raise UnsupportedError(
                f"Transformer Engine runs nn.Linear only, not {type(module).__name__}",
                where=f"layer '{name}'",
                fix="use backend 'native'",
            )
        _check_pairs(plan, name)
        te = require("transformer_engine.pytorch", purpose=_PURPOSE)
        weight: Any = module.weight
        shell = te.Linear(
            module.in_features, module.out_features, bias=False, params_dtype=weight.dtype, device="meta", name=name
        )
        shell.weight = weight
        context = self._context(te, plan, name, weight.device)

        def product(x: Tensor, _weight: Tensor) -> Tensor:
            with torch.autocast(x.device.type, x.dtype, enabled=x.dtype is not weight.dtype), context():
                out: Tensor = shell(x)
            return out

        execution = LibraryExecution(plan, self.name, product, plan_labels(plan), _alignment(plan), torch.bfloat16)
        execution.note = ""
        return execution

    def around_model(self) -> Callable[[], AbstractContextManager[Any]] | None:
        """Return what the model's forward is run in: delayed scales are updated when this outermost context ends."""
        return self._outer

    def _context(
        self, te: Any, plan: LayerPlan, name: str, device: torch.device
    ) -> Callable[[], AbstractContextManager[Any]]:
        recipes = require("transformer_engine.common.recipe", purpose=_PURPOSE)
        if self._outer is None:
            require("transformer_engine.pytorch.quantization", purpose=_PURPOSE).FP8GlobalStateManager.reset()
        if _version() >= (2, 19):
            if self._factory is None:
                self._factory = QuantizerFactory(te, device)
                self._custom = recipes.CustomRecipe(qfactory=self._factory)
                self._outer = lambda: te.autocast(enabled=True, recipe=self._custom)
            self._factory.plans[name] = plan
            return lambda: te.autocast(enabled=True, recipe=self._custom)
        chosen = {plan.recipe(gemm) for gemm in GEMMS}
        recipe = chosen.pop()
        if chosen:
            raise UnsupportedError(
                "different recipes for the GEMMs of one layer need Transformer Engine 2.19 or newer",
                where=f"layer '{name}'",
                fix="pip install -U 'transformer-engine[pytorch]'",
            )
        if recipe is None or not recipe.scaled:
            return contextlib.nullcontext if self._outer is None else lambda: te.autocast(enabled=False)
        built = _builtin_recipe(recipes, recipe)
        if self._outer is None:
            self._outer = lambda: te.autocast(enabled=True, recipe=built)
        return lambda: te.autocast(enabled=True, recipe=built)


def _check_pairs(plan: LayerPlan, name: str) -> None:
    """Refuse plans whose slots TE cannot build: delayed scaling has no per-direction form."""
    recipes = {gemm: plan.recipe(gemm) for gemm in GEMMS}
    delayed = {
        g for g, r in recipes.items() if r is not None and r.scaling is not None and r.scaling.scale == "delayed"
    }
    if delayed and len(set(recipes.values())) > 1:
        raise UnsupportedError(
            "Transformer Engine cannot mix delayed scaling with another recipe in one layer",
            where=f"layer '{name}'",
            fix="use current scaling for this layer, or one recipe for its three GEMMs",
        )
    for gemm, recipe in recipes.items():
        if recipe is not None and recipe.operands is not None:
            formats = {recipe.operand_format(operand) for operand in GEMM_OPERANDS[gemm]}
            if formats == {"e5m2"}:
                raise UnsupportedError("pure E5M2 GEMMs do not exist", where=f"layer '{name}'")
