"""``--to msamp``: MS-AMP's opt level, its DeepSpeed section, and the layers it must leave alone.

MS-AMP has one recipe (delayed FP8 with power-of-two scales over 16 steps, E5M2 output gradients) and three levels of
optimizer state; a layer is in or out (``use_fp32_linear``). It installs only in its own container.
"""

from __future__ import annotations

import json

from autoprec.export.base import Export, Losses, Request
from autoprec.export.naming import header, name_plans, rule_table
from autoprec.export.operators import autocast_operators
from autoprec.export.snippets import PLAN_OF, fill
from autoprec.export.stacks.python import operator_losses
from autoprec.export.summary import high_dtype, lose_rule
from autoprec.policy import CommunicationPolicy, LayerPlan, OptimizerPolicy, Policy
from autoprec.policy.levels import level

__all__ = ["MsAmpExporter", "nearest_level"]

_BODY = '''import re

import msamp
from torch import nn

# (regular expression on module names, plan); the first match wins
RULES = @RULES@
FP8 = @FP8@  # plans that run in FP8; every other layer keeps its own precision
OPT_LEVEL = "@LEVEL@"

@PLAN_OF@

def initialize(model, optimizer):
    """Return (model, optimizer) under MS-AMP; trace or compile the model before, not after."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and plan_of(name) not in FP8:
            module.use_fp32_linear = True
    return msamp.initialize(model, optimizer, opt_level=OPT_LEVEL)
'''


def nearest_level(policy: Policy) -> tuple[str, OptimizerPolicy, CommunicationPolicy]:
    """Return the MS-AMP level whose state is nearest to a policy's, and what it stores and sends."""
    second = policy.optimizer.exp_avg == "e4m3" or policy.optimizer.exp_avg_sq == "fp16_scaled"
    found = level("msamp-o2" if second else "msamp-o1")
    return "O2" if second else "O1", found.optimizer, found.communication


class MsAmpExporter:
    """Microsoft MS-AMP (FP8-LM)."""

    name = "msamp"
    summary = "MS-AMP: opt level, DeepSpeed section, layers it leaves alone"

    def export(self, request: Request) -> Export:
        """Return ``precision_msamp.py`` and ``ds_msamp.json``."""
        losses = Losses()
        policy = request.policy
        name, optimizer, communication = nearest_level(policy)
        for part, value in policy.optimizer.model_dump().items():
            runs = getattr(optimizer, part)
            if value != runs:
                losses.add(f"optimizer.{part}: {value}", f"{runs} (MS-AMP {name})")
        if policy.communication != communication:
            losses.add(f"communication.gradients: {policy.communication.gradients}", f"fp8 (MS-AMP {name})")
        rules = request.rules()
        names = name_plans(policy, rules)
        own = LayerPlan.uniform(level("msamp-o1").recipe)
        eight = []
        for rule in rules:
            if rule.plan.scaled:
                eight.append(names[rule.plan])
                if rule.plan != own:
                    lose_rule(losses, rule, "MS-AMP's own recipe: fp8 delayed e4m3/e4m3/e5m2, 16 steps")
            elif high_dtype(request, rule.plan) not in ("keep", policy.activations):
                lose_rule(losses, rule, "the layer as the script wrote it")
        operator_losses(request, losses)
        autocast_operators(request, losses, lost="the autocast dtype: cast the logits in the script")
        source = fill(_BODY, RULES=rule_table(rules, names), FP8=json.dumps(sorted(set(eight))), LEVEL=name)
        section = {"msamp": {"enabled": True, "opt_level": name, "use_te": False}}
        files = {
            "precision_msamp.py": header(request, "MS-AMP") + fill(source, PLAN_OF=PLAN_OF),
            "ds_msamp.json": json.dumps(section, indent=2) + "\n",
        }
        notes = (
            "runs in ghcr.io/azure/msamp:v0.4.0-cuda12.2 on H100 only: MS-AMP looks for 'h100' in the device name",
            "O3 (FP8 weights) exists under DeepSpeed ZeRO 1/2 only: set opt_level in ds_msamp.json",
        )
        return Export(self.name, files, losses.done(), notes, losses.kept)
