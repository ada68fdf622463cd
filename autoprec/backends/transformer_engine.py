"""The ``transformer_engine`` backend: TE's modules around the model's own Parameters, one recipe object per policy.

A ``te.Linear`` built on the meta device is lent the layer's weight and called from the layer's own forward. It is not a
submodule of the model, so names, ``state_dict`` (no ``_extra_state``), optimizer and hooks stay as they are. One
``CustomRecipe`` (TE 2.19 and newer), whose factory answers per layer and GEMM, serves the whole model. TE ignores a
changed recipe of the same class on a live module, so every policy gets fresh modules and a reset of TE's global state.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo

from autoprec.backends.base import Backend, misaligned
from autoprec.backends.library import LibraryExecution
from autoprec.backends.te_quantizers import (
    QuantizerFactory,
    accumulation,
    check_pairs,
    delayed_scaling,
    refusal,
    with_accumulation,
)
from autoprec.backends.te_state import DelayedMemory, EngineState, delayed_buffers
from autoprec.errors import MissingDependencyError, UnsupportedError
from autoprec.numerics.linear import in_backward
from autoprec.policy import LayerPlan
from autoprec.precision.hardware import Capability
from autoprec.precision.recipes import Gemm, Recipe
from autoprec.support.optional import installed_version, require

_PURPOSE = "backend 'transformer_engine'"
#: Multiples TE's kernels need of every dimension.
_ALIGNMENT = {"fp8": 16, "mxfp8": 32, "nvfp4": 16}


def _alignment(plan: LayerPlan) -> int:
    sizes = [16]  # TE checks the sizes of a layer inside autocast even where nothing is quantised
    for recipe in plan.scaled:
        block = recipe.scaling is not None and recipe.scaling.granularity == "block"
        sizes.append(128 if block else _ALIGNMENT[recipe.format])
    return max(sizes)


def _compute(plan: LayerPlan) -> torch.dtype | None:
    """Return the dtype operands reach TE in: bfloat16 for NVFP4's Hadamard transform, else None: the script's.

    Operands cast first would be rounded twice; a bf16 GEMM casts in its own slot.
    """
    return torch.bfloat16 if any(recipe.format == "nvfp4" for recipe in plan.scaled) else None


class TransformerEngineBackend(Backend):
    """One instance serves one policy on one model."""

    name = "transformer_engine"
    ran_on = frozenset({(9, 0)})

    def __init__(self) -> None:
        self._state: EngineState | None = None
        self._factory: QuantizerFactory | None = None
        self._recipes: dict[Any, Any] = {}
        self._outer: Any = None
        self._algorithm: tuple[str, str] | None = None

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
        why = misaligned(gemm, m, k, n, size)
        return Capability(not why, why or f"Transformer Engine {recipe.describe()}")

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
        check_pairs(plan, name)
        state = self._started()
        weight: Any = module.weight
        shell = state.te.Linear(
            module.in_features, module.out_features, bias=False, params_dtype=weight.dtype, device="meta", name=name
        )
        recipe, delayed = self._recipe(plan, name, weight.device), delayed_scaling(plan.fprop)
        scale: Tensor | None = None
        memory = None if delayed is None else DelayedMemory(shell, delayed.amax_history_len)

        def product(x: Tensor, weight: Tensor) -> Tensor:
            nonlocal scale
            # each time anew: a copy of the model, FSDP2 and parametrisations come with another tensor
            shell._parameters["weight"] = weight
            again = in_backward()
            context = state.repeated(recipe, shell, scale) if again else state.entered(recipe)
            with torch.autocast(x.device.type, x.dtype, enabled=x.dtype is not weight.dtype), context:
                if memory is not None and not again:
                    memory.restore()
                out: Tensor = shell(x)
                if delayed is not None and not again and (buffers := delayed_buffers(shell)) is not None:
                    scale = buffers[0].clone()
            if delayed is not None:
                state.watch(out)
            return out

        why = "Transformer Engine's delayed scaling breaks compiled graphs: it runs between them"
        return LibraryExecution(
            plan,
            product if delayed is None else _disable_dynamo(product),
            plan.labels,
            _alignment(plan),
            compute=_compute(plan),
            backend=self.name,
            uncompiled="" if delayed is None else why,
            memory=memory,
        )

    def around_model(self) -> Callable[[], AbstractContextManager[Any]] | None:
        """Return what the model's forward is run in, if delayed scales are to be updated when it ends; else None."""
        if self._outer is None or self._state is None:
            return None
        state, recipe = self._state, self._outer
        return lambda: state.entered(recipe)

    def after_step(self) -> Callable[[], None] | None:
        """Return what updates backward scales once an optimizer has stepped, so that checkpoints have the next ones."""
        return None if self._outer is None or self._state is None else self._state.settle

    def _started(self) -> EngineState:
        if self._state is None:
            self._state = EngineState(_PURPOSE)
            self._state.start_over()
        return self._state

    def _recipe(self, plan: LayerPlan, name: str, device: torch.device) -> Any:
        """Return the recipe object a layer runs under; equal needs share one object."""
        if (scaling := delayed_scaling(plan.fprop)) is not None:
            self._one_algorithm(scaling.amax_compute_algo, name)
        recipes = require("transformer_engine.common.recipe", purpose=_PURPOSE)
        if self._factory is None:
            self._factory = QuantizerFactory(self._started().te, recipes, device)
        self._factory.plans[name] = plan
        key = accumulation(plan)
        if key not in self._recipes:
            self._recipes[key] = with_accumulation(recipes, recipes.CustomRecipe(qfactory=self._factory), plan)
        if self._outer is None and scaling is not None:
            self._outer = self._recipes[key]
        return self._recipes[key]

    def _one_algorithm(self, algorithm: str, name: str) -> None:
        """Refuse two amax algorithms: TE builds the delayed recipe itself, and keys its buffers without it."""
        first, asked_by = self._algorithm = self._algorithm or (algorithm, name)
        if first != algorithm:
            raise UnsupportedError(
                f"Transformer Engine would use amax_compute_algo {algorithm} for layer '{asked_by}' too, "
                f"which asks for {first}",
                where=f"layer '{name}'",
                fix="use one amax_compute_algo for all delayed layers",
            )
