"""``--to axolotl``: the precision keys of an axolotl YAML, which are for the whole model."""

from __future__ import annotations

from typing import Any

from autoprec.export.base import Export, Losses, Request, state_losses
from autoprec.export.naming import header
from autoprec.export.operators import autocast_operators
from autoprec.export.summary import high_dtype, lose_rule, main_plan
from autoprec.policy import LayerPlan, dump_yaml
from autoprec.precision.recipes import BUILTIN_RECIPES

__all__ = ["AxolotlExporter"]

#: What axolotl's ``fp8: true`` runs: torchao's default through accelerate.
_OWN = LayerPlan.uniform(BUILTIN_RECIPES["fp8_tensorwise"])


class AxolotlExporter:
    """axolotl."""

    name = "axolotl"
    summary = "axolotl: fp8 / bf16 / fp16 keys (whole model)"

    def export(self, request: Request) -> Export:
        """Return ``axolotl_precision.yaml``: keys to merge into a configuration."""
        losses = Losses()
        policy = request.policy
        rules = request.rules()
        eight = main_plan(request) is not None and self._mostly_eight(request)
        config: dict[str, Any] = {}
        dtype = policy.activations
        if eight:
            config |= {"fp8": True, "fp8_enable_fsdp_float8_all_gather": False, "torch_compile": True}
            if dtype != "bf16":
                losses.add(f"activations: {dtype}", "bf16")
            dtype = "bf16"
        config |= {"bf16": dtype == "bf16", "fp16": dtype == "fp16"}
        runs = "fp8 per tensor e4m3/e4m3/e5m2 on every linear layer" if eight else dtype.replace("keep", "as written")
        for rule in rules:
            plain = high_dtype(request, rule.plan)
            if eight:
                differs = rule.plan != _OWN and request.runs(rule.plan)
            else:
                differs = bool(rule.plan.scaled) or plain not in ("keep", dtype)
            if differs:
                lose_rule(losses, rule, runs)
        if policy.loss_scaling == "dynamic" and dtype != "fp16":
            losses.add("loss_scaling: dynamic", "none")
        if policy.execution == "compile" or (policy.execution == "eager" and not eight):
            config["torch_compile"] = policy.execution == "compile"
        switched = config.get("torch_compile") == (policy.execution == "compile")
        autocast_operators(
            request,
            losses,
            output="accelerate casts the model's output to fp32",
            execution="torch_compile" if switched else "",
        )
        state_losses(request, losses)
        text = header(request, "axolotl") + dump_yaml(config)
        notes = ("axolotl's YAML knows no layers; for the rules use autoprec run, or a plugin that applies the policy",)
        return Export(self.name, {"axolotl_precision.yaml": text}, losses.done(), notes, losses.kept)

    @staticmethod
    def _mostly_eight(request: Request) -> bool:
        """Say whether more layers are better served by FP8 everywhere than by FP8 nowhere."""
        if request.layers:
            plans = list(request.plans().values())
            return sum(bool(plan.scaled) for plan in plans) * 2 > len(plans)
        return bool(request.rules()[-1].plan.scaled)
