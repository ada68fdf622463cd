"""The ``transformer_engine`` backend: TE's modules around the model's own Parameters, one recipe object per policy.

A ``te.Linear`` built on the meta device is lent the layer's weight and called from the layer's own forward. It is not a
submodule of the model, so names, ``state_dict`` (no ``_extra_state``), optimizer and hooks stay as they are. One
``CustomRecipe`` (TE 2.19 and newer), whose factory answers per layer and GEMM, serves the whole model. TE ignores a
changed recipe of the same class on a live module, so every policy gets fresh modules. Delayed scaling is refused: TE
keeps its scales in a state of the whole process, and ``native`` has its own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from autoprec.backends.base import Backend, feature_sizes
from autoprec.backends.library import LibraryExecution
from autoprec.backends.te_quantizers import QuantizerFactory, accumulation, refusal, with_accumulation
from autoprec.errors import MissingDependencyError, UnsupportedError
from autoprec.policy import LayerPlan
from autoprec.precision.hardware import Capability
from autoprec.precision.recipes import GEMMS, Gemm, Recipe
from autoprec.support.optional import installed_version, require

_PURPOSE = "backend 'transformer_engine'"
#: Multiples TE's kernels need of every dimension.
_ALIGNMENT = {"fp8": 16, "mxfp8": 32, "nvfp4": 16}


def _alignment(plan: LayerPlan) -> int:
    sizes = [16]  # TE checks the sizes of a layer inside autocast even where nothing is quantised
    for gemm in GEMMS:
        recipe = plan.recipe(gemm)
        if recipe is not None and recipe.scaled:
            block = recipe.scaling is not None and recipe.scaling.granularity == "block"
            sizes.append(128 if block else _ALIGNMENT[recipe.format])
    return max(sizes)


def _compute(plan: LayerPlan) -> torch.dtype | None:
    """Return the dtype operands reach TE in: bfloat16 for NVFP4's Hadamard transform, else None: the script's.

    Operands cast first would be rounded twice; a bf16 GEMM casts in its own slot.
    """
    nvfp4 = any((recipe := plan.recipe(gemm)) is not None and recipe.format == "nvfp4" for gemm in GEMMS)
    return torch.bfloat16 if nvfp4 else None


class TransformerEngineBackend(Backend):
    """One instance serves one policy on one model."""

    name = "transformer_engine"
    experimental = frozenset({"cuda"})

    def __init__(self) -> None:
        self._factory: QuantizerFactory | None = None
        self._recipes: dict[Any, Any] = {}

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
        found = self.available(device)
        if not found:
            return found
        if not recipe.scaled:
            ok = recipe.format == "bf16" and recipe.output == "keep"
            return Capability(ok, "bf16 inside TE" if ok else f"leave {recipe.describe()} layers to another backend")
        refused = refusal(recipe)
        if refused:
            return Capability(False, refused)
        checks = {"mxfp8": "is_mxfp8_available", "nvfp4": "is_nvfp4_available"}
        block = recipe.scaling is not None and recipe.scaling.granularity == "block"
        check = "is_fp8_block_scaling_available" if block else checks.get(recipe.format, "is_fp8_available")
        ok, reason = getattr(require("transformer_engine.pytorch"), check)(return_reason=True)
        if not ok:
            return Capability(False, reason)
        wide_scales = recipe.scaling is not None and not recipe.scaling.power_of_2
        if block and wide_scales and torch.cuda.get_device_capability(device) >= (10, 0):
            return Capability(False, "Transformer Engine runs blocks as MXFP8 here, whose scales are powers of two")
        size = 128 if block else _ALIGNMENT[recipe.format]
        for label, value in feature_sizes(gemm, m, k, n).items():
            if value % size:
                return Capability(False, f"{gemm} {label} = {value} is not a multiple of {size}")
        return Capability(True, f"Transformer Engine {recipe.describe()}")

    def bind(self, plan: LayerPlan, module: nn.Module, *, name: str, seed: int) -> LibraryExecution:
        """Return an execution around a fresh ``te.Linear`` that is lent the module's weight in each call.

        Raises:
            UnsupportedError: a plan this version of Transformer Engine cannot express, or a module other than Linear.
        """
        del seed
        if not isinstance(module, nn.Linear):
            raise UnsupportedError(
                f"Transformer Engine runs nn.Linear only, not {type(module).__name__}",
                where=f"layer '{name}'",
                fix="use backend 'native'",
            )
        te, weight = require("transformer_engine.pytorch", purpose=_PURPOSE), module.weight
        shell = te.Linear(
            module.in_features, module.out_features, bias=False, params_dtype=weight.dtype, device="meta", name=name
        )
        recipe = self._recipe(te, plan, name, weight.device)

        def product(x: Tensor, weight: Tensor) -> Tensor:
            # each time anew: a copy of the model, FSDP2 and parametrisations come with another tensor
            shell._parameters["weight"] = weight
            narrow = torch.autocast(x.device.type, x.dtype, enabled=x.dtype is not weight.dtype)
            with narrow, te.autocast(enabled=True, recipe=recipe):
                out: Tensor = shell(x)
            return out

        return LibraryExecution(
            plan,
            product,
            plan.labels,
            _alignment(plan),
            compute=_compute(plan),
            casts_weight=False,
            backend=self.name,
        )

    def _recipe(self, te: Any, plan: LayerPlan, name: str, device: torch.device) -> Any:
        """Return the recipe object a layer runs under; equal needs share one object."""
        recipes = require("transformer_engine.common.recipe", purpose=_PURPOSE)
        if self._factory is None:
            self._factory = QuantizerFactory(te, device)
        self._factory.plans[name] = plan
        key = accumulation(plan)
        if key not in self._recipes:
            self._recipes[key] = with_accumulation(recipes, recipes.CustomRecipe(qfactory=self._factory), plan)
        return self._recipes[key]
