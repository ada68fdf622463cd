"""The policies of the horizon study, from harmless to bad.

Those marked ``refused`` cannot be written as a policy at all: the schema refuses them with the reason. They are built
around it here, so that the study can say whether what a search measures would have caught them as well.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from autoprec.optim.codecs import CODECS, CastCodec
from autoprec.policy import LayerRule, OptimizerPolicy, Policy
from autoprec.precision.recipes import BUILTIN_RECIPES, Recipe

__all__ = ["POLICIES", "Case", "policy_of"]

#: Storage that ``autoprec.policy`` refuses; only this study has codecs for it.
CODECS.setdefault(("weights", "bf16"), CastCodec("bf16", torch.bfloat16))
CODECS.setdefault(("exp_avg_sq", "fp16"), CastCodec("fp16", torch.float16))
CODECS.setdefault(("exp_avg_sq", "bf16"), CastCodec("bf16", torch.bfloat16))

_RECIPES = {
    **BUILTIN_RECIPES,
    "e5m2_forward": Recipe.model_validate(
        {"format": "fp8", "scaling": {"granularity": "row"}, "operands": {"input": "e5m2"}}
    ),
    "fp8_one_step": Recipe.model_validate(
        {"format": "fp8", "scaling": {"scale": "delayed", "amax_history_len": 1}, "operands": {"grad_output": "e5m2"}}
    ),
}


@dataclass(frozen=True)
class Case:
    """One policy of the study.

    Attributes:
        recipe: of every layer.
        kept: layers that run ``kept_recipe`` instead: ``head`` and ``first`` of the task.
        wgrad: recipe of the weight gradients, where another.
        state: the optimizer section.
        offered: a search on a CPU may choose it; an INT8 head with one scale a tensor was withdrawn after this study.
        last: from this share of the run on everything is in bf16, with plain optimizer state.
        refused: the schema refuses it.
        bad: known to be bad in a long run; the others are not known.
    """

    recipe: str = "keep"
    kept: tuple[str, ...] = ()
    kept_recipe: str = "bf16"
    wgrad: str = ""
    state: tuple[tuple[str, str], ...] = ()
    activations: str = "keep"
    offered: bool = True
    last: float = 1.0
    refused: bool = False
    bad: bool = False

    @property
    def backend(self) -> str:
        """INT8 runs as a search on a CPU runs it, by the integer GEMM; what a CPU does not multiply is emulated."""
        return "auto" if self.recipe.startswith("int8") else "emulated"


def _state(**formats: str) -> tuple[tuple[str, str], ...]:
    return tuple(formats.items())


POLICIES: dict[str, Case] = {
    "bf16": Case("bf16"),
    "fp8 row, head bf16": Case("fp8_rowwise", ("head",)),
    "fp8 tensor hybrid": Case("fp8_tensorwise"),
    "fp8 delayed 16, head bf16": Case("fp8_delayed", ("head",)),
    "bf16 weights, stochastic": Case("bf16", state=_state(weights="bf16_stochastic", gradients="bf16")),
    "moments e4m3 + fp16 scaled": Case("bf16", state=_state(exp_avg="e4m3", exp_avg_sq="fp16_scaled")),
    "int8 tensor": Case("int8_tensor", offered=False),
    "int8 row": Case("int8"),
    "int8 row, wgrad bf16": Case("int8", wgrad="bf16"),
    "int8 row, wgrad kept": Case("int8", wgrad="keep"),
    "int8 tensor, head kept": Case("int8_tensor", ("head",), "keep"),
    "int8 tensor, head int8 row": Case("int8_tensor", ("head",), "int8"),
    "nvfp4, ends bf16": Case("nvfp4", ("head", "first")),
    "nvfp4, ends bf16, last 15 % bf16": Case("nvfp4", ("head", "first"), last=0.85),
    "fp8 e5m2 forward": Case("e5m2_forward", bad=True),
    "fp4 everywhere": Case("nvfp4_plain", bad=True),
    "fp8 delayed 1 step": Case("fp8_one_step", bad=True),
    "bf16 weights, plain": Case("bf16", state=_state(weights="bf16"), refused=True, bad=True),
    "second moment fp16, unscaled": Case("bf16", state=_state(exp_avg_sq="fp16"), refused=True, bad=True),
}


def policy_of(case: Case, layers: dict[str, str]) -> Policy:
    """Return the policy of a case; ``layers`` names the task's ``head`` and ``first``, and a ``recurrent`` one."""
    gemms: Any = {"wgrad": case.wgrad} if case.wgrad else {}
    rules = [LayerRule(match=layers[kept], recipe=case.kept_recipe) for kept in case.kept]
    rules += [LayerRule(match=layers["recurrent"], recipe="keep")] if layers.get("recurrent") else []
    rules.append(LayerRule(match="*", recipe=case.recipe, gemms=gemms))
    names = {rule.recipe for rule in rules} | set(gemms.values())
    recipes = {name: _RECIPES[name] for name in sorted(names - {"keep"})}
    made = Policy(activations=case.activations)  # type: ignore[arg-type]
    made = made.model_copy(update={"recipes": recipes, "layers": tuple(rules)})  # unchecked: some are refused
    given = dict(case.state)
    make: Callable[..., OptimizerPolicy] = OptimizerPolicy.model_construct if case.refused else OptimizerPolicy
    return made.model_copy(update={"optimizer": make(**given)}) if given else made
