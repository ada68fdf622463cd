"""Finds what runs each layer under a plan, and by which backend, before anything of a model is changed."""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from autoprec.applying.attention import attention_refusal
from autoprec.applying.units import Unit
from autoprec.backends import BACKENDS, Backend, choose, get
from autoprec.errors import AutoPrecWarning, UnsupportedError
from autoprec.numerics.one_dtype import ConvExecution, RecurrentExecution
from autoprec.numerics.plan import NATIVE
from autoprec.policy import LayerPlan, Policy
from autoprec.precision.hardware import recipe_family
from autoprec.precision.recipes import GEMMS


def timed_backends(policy: Policy, device: str, held: Mapping[str, Backend]) -> dict[str, Backend]:
    """Return recipe family -> the backend that the policy was found with; those that native runs are left out.

    What its evidence names and this machine lacks is said, and native runs it. A row is about the kind of device that
    it was timed on, a GPU where it does not say.

    Args:
        held: backends by name that already run layers of the model.
    """
    found = policy.evidence.get("backends")
    if not isinstance(found, Mapping):
        return {}
    made = dict(held)
    out: dict[str, Backend] = {}
    for name, recipe in policy.recipes.items():
        row = found.get(name)
        row = row if isinstance(row, Mapping) else {}
        asked = str(row.get("backend") or "")
        if asked in ("", "native", "emulated") or row.get("device", "cuda") != device.split(":")[0]:
            continue
        why = "this version does not know it"
        if asked in BACKENDS:
            backend = made[asked] = made.get(asked) or get(asked)
            if available := backend.available(device):
                out[recipe_family(recipe)] = backend
                continue
            why = available.reason
        warnings.warn(
            f"{name} was found with backend '{asked}', which cannot run here: {why}; native runs it, and its speed may "
            "differ",
            AutoPrecWarning,
            stacklevel=4,
        )
    return out


#: Kinds of units that run in one dtype.
_ONE_DTYPE: dict[str, tuple[Any, str]] = {
    "conv": (ConvExecution, "a convolution"),
    "recurrent": (RecurrentExecution, "a recurrent layer"),
}


@dataclass(frozen=True, slots=True)
class Binder:
    """Finds what runs each layer, before anything is changed.

    ``faster``: recipe family -> the backend that is preferred to ``backend``, where it can run the layer; ``refused``:
    backend -> layers that it cannot run, each with the reason.
    """

    backend: Backend
    device: str
    auto: bool
    strict: bool
    faster: Mapping[str, Backend]
    refused: dict[str, dict[str, str]] = field(default_factory=dict)

    def say_refused(self) -> None:
        """Warn of layers that do not run by what their recipe was found with."""
        for asked, layers in self.refused.items():
            first, why = next(iter(layers.items()))
            others = ", ..." if len(layers) > 1 else ""
            warnings.warn(
                f"{len(layers)} layers ({first}{others}) were found with backend '{asked}', "
                f"which cannot run them: {why}; {self.backend.name} runs them, and their speed may differ",
                AutoPrecWarning,
                stacklevel=4,
            )

    def bind(self, name: str, unit: Unit, plan: LayerPlan) -> Any:
        """Return what runs one layer, or None (with ``strict`` off) where nothing can.

        Args:
            name: of the layer.
            unit: the layer.
            plan: a recipe per GEMM.
        """
        seed, fix = zlib.crc32(name.encode()), "choose another recipe for it"
        if unit.kind in _ONE_DTYPE:
            execution, what = _ONE_DTYPE[unit.kind]
            refusal = _one_dtype_refusal(plan, what)
            if not refusal:
                kept = "fp32" if plan.fprop is None else plan.fprop.format
                return execution(plan, unit.module, kept, self.backend.emulates_casts, backend="native")
        else:
            refusal = attention_refusal(unit.module) if isinstance(unit.module, nn.MultiheadAttention) else ""
            if not refusal and not plan.scaled:
                # plain casts are torch's own business, whichever library runs the 8-bit layers
                runner = self.backend if self.backend.name == "emulated" else choose("auto", self.device)
                return runner.bind(plan, unit.module, name=name, seed=seed)
            faster = {self.faster.get(recipe_family(recipe)) for recipe in plan.scaled}
            # weights of experts stay: what was timed are linears, and only torch's own path groups experts
            other = faster.pop() if len(faster) == 1 and unit.weight.ndim == 2 else None
            if not refusal and other is not None:
                why = self._refusal(other, unit, plan)
                try:
                    if not why:
                        return other.bind(plan, unit.module, name=name, seed=seed)
                except UnsupportedError as error:  # a mixture of recipes that the library does not know
                    why = error.what
                self.refused.setdefault(other.name, {})[name] = why
            if not refusal:
                refusal = self._refusal(self.backend, unit, plan)
                fix += ", or backend 'emulated' to compute its numerics without the hardware" if refusal else ""
                if refusal and self.auto:
                    execution = get("emulated").bind(plan, unit.module, name=name, seed=seed)
                    execution.note = f"emulated because {refusal}"
                    return execution
            if not refusal:
                return self.backend.bind(plan, unit.module, name=name, seed=seed)
        if self.strict:
            raise UnsupportedError(refusal, where=f"layer '{name}'", fix=fix)
        return None

    def _refusal(self, backend: Backend, unit: Unit, plan: LayerPlan) -> str:
        """Return why a backend cannot run a linear layer, or an empty string."""
        n, k = unit.weight.shape[-2:] if unit.weight.ndim >= 2 else (0, 0)
        if unit.weight.ndim < 2 and isinstance(unit.module, nn.Linear):
            # FSDP's first version holds a flat part of it, and gathers it for each forward
            n, k = unit.module.out_features, unit.module.in_features
        if unit.kind == "conv1d":
            n, k = k, n
        sizes = {"fprop": (0, k, n), "dgrad": (0, n, k), "wgrad": (n, 0, k)}
        for gemm in GEMMS:
            recipe = plan.recipe(gemm)
            if recipe is None:
                continue
            m_, k_, n_ = sizes[gemm]
            found = backend.capability(recipe, gemm=gemm, m=m_, k=k_, n=n_, device=self.device)
            if not found:
                return f"{backend.name} cannot run {gemm} as {recipe.describe()}: {found.reason}"
        return ""


def _one_dtype_refusal(plan: LayerPlan, what: str) -> str:
    """Return why a convolution or a recurrent layer, which run in one dtype, cannot run a plan; empty when they can."""
    formats = {None if recipe is None else recipe.format for recipe in plan.recipes}
    found = formats.pop()
    if formats:
        return f"{what} runs one recipe in all three passes"
    if plan.fprop is not None and plan.fprop.output == "fp32":
        return f"{what} returns the dtype that it runs in: leave output: fp32 to a linear layer"
    if found not in NATIVE:
        return f"no device runs {what} in {found} in training: fp32, bf16 or fp16 only"
    return ""
