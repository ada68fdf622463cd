"""``--to torchtitan``: ``Float8LinearConverter.Config``, one recipe and a list of names to skip.

``filter_fqns`` are *substrings*: ``layers.1`` also skips ``layers.10``. The list is therefore built from the model's
layer names and checked against them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from autoprec.export.base import Export, Losses, Request, state_losses
from autoprec.export.naming import header
from autoprec.export.operators import report_operators
from autoprec.export.summary import high_dtype, lose_rule, main_plan
from autoprec.policy import LayerPlan
from autoprec.precision.recipes import BUILTIN_RECIPES

__all__ = ["TorchtitanExporter", "skip_list"]

_RECIPES = {
    LayerPlan.uniform(BUILTIN_RECIPES["fp8_tensorwise"]): "tensorwise",
    LayerPlan.uniform(BUILTIN_RECIPES["fp8_rowwise"]): "rowwise",
}

_BODY = '''from torchtitan.components.quantization.float8 import Float8LinearConverter


def converters(model_compile_enabled=True, emulate=False):
    """Use in a config function: model_registry(..., converters=converters())."""
    return [
        Float8LinearConverter.Config(
            recipe_name=@RECIPE@,
            filter_fqns=@SKIP@,
            emulate=emulate,
            model_compile_enabled=model_compile_enabled,
        ),
    ]
'''


_NOTHING = '''def converters(model_compile_enabled=True, emulate=False):
    """No layer runs in FP8."""
    return []
'''


def skip_list(skipped: Sequence[str], kept: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return (substrings that skip every layer of ``skipped`` and none of ``kept``, layers no substring separates).

    Short common parts are preferred: ``attention.wo`` rather than 32 full names.
    """
    out: list[str] = []
    stuck: list[str] = []
    for name in skipped:
        if any(part in name for part in out):
            continue
        parts = name.split(".")
        options = [".".join(parts[i:j]) for i in range(len(parts)) for j in range(i + 1, len(parts) + 1)]
        usable = [option for option in options if not any(option in other for other in kept)]
        if usable:
            out.append(max(usable, key=lambda option: (sum(option in other for other in skipped), -len(option))))
        else:
            stuck.append(name)
    return out, stuck


_IN_BF16 = "bf16 in and out, accumulated in fp32 inside the kernel (FSDP2's mixed precision, no autocast)"
_KEPT = dict.fromkeys(("loss", "output"), "torchtitan's loss casts the model's output to fp32")
_LOST = {"softmax": _IN_BF16, "norm": _IN_BF16, "embedding": "bf16"}


class TorchtitanExporter:
    """torchtitan."""

    name = "torchtitan"
    summary = "torchtitan: Float8LinearConverter with one recipe and names to skip"

    def export(self, request: Request) -> Export:
        """Return ``precision_torchtitan.py``."""
        losses = Losses()
        main = main_plan(request)
        runs = ""
        if main is not None:
            runs = _RECIPES.get(main) or self._nearest(main)
        for rule in request.rules():
            if rule.plan.scaled:
                expressed = next((plan for plan, name in _RECIPES.items() if name == runs), None)
                if rule.plan != expressed:
                    lose_rule(losses, rule, f"torchao's {runs} recipe" if rule.plan == main else "bf16")
            elif high_dtype(request, rule.plan) not in ("keep", "bf16"):
                lose_rule(losses, rule, "bf16")
        skipped, stuck = self._skipped(request, main, losses)
        for name in stuck:
            losses.add("its own precision", f"torchao's {runs} recipe (no substring separates it)", name)
        if request.policy.activations != "bf16":
            losses.add(f"activations: {request.policy.activations}", "bf16 (torchtitan's mixed precision)")
        if request.policy.loss_scaling == "dynamic":
            losses.add("loss_scaling: dynamic", "none")
        report_operators(request, losses, _KEPT, _LOST)
        state_losses(request, losses)
        if main is None:
            body = _NOTHING
        else:
            body = _BODY.replace("@RECIPE@", json.dumps(runs)).replace("@SKIP@", json.dumps(skipped))
        text = header(request, "torchtitan") + body
        notes = ("--training.mixed_precision_param bfloat16; layers without FP8 run in bf16",)
        return Export(self.name, {"precision_torchtitan.py": text}, losses.done(), notes, losses.kept)

    @staticmethod
    def _nearest(plan: LayerPlan) -> str:
        rows = [r for r in (plan.fprop, plan.dgrad, plan.wgrad) if r is not None and r.scaling is not None]
        return (
            "tensorwise" if rows and all(r.scaling and r.scaling.granularity == "tensor" for r in rows) else "rowwise"
        )

    @staticmethod
    def _skipped(request: Request, main: LayerPlan | None, losses: Losses) -> tuple[list[str], list[str]]:
        if main is None:
            return [], []
        if request.layers:
            plans = request.plans()
            return skip_list([n for n, p in plans.items() if p != main], [n for n, p in plans.items() if p == main])
        for rule in request.rules():
            if rule.plan != main:
                lose_rule(losses, rule, f"{main.describe()} (substrings need layer names: pass --layers)")
        return [], []
