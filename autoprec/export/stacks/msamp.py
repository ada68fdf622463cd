"""``--to msamp``: MS-AMP's opt level, its DeepSpeed section, and the layers it must leave alone.

MS-AMP has one recipe (delayed FP8 with power-of-two scales over 16 steps, E5M2 output gradients) and three levels of
optimizer state; a layer is in or out (``use_fp32_linear``). It installs only in its own container.
"""

from __future__ import annotations

import json

from autoprec.export.base import Losses, Request, Written
from autoprec.export.naming import header, name_plans, rule_table
from autoprec.export.settings import SCALER, report_settings
from autoprec.export.snippets import fill
from autoprec.export.summary import fast_forward, lose
from autoprec.export.words import Words
from autoprec.policy import CommunicationPolicy, LayerPlan, OptimizerPolicy, Policy
from autoprec.policy.library import published
from autoprec.policy.sections import STEPPING


def nearest_level(policy: Policy) -> tuple[str, OptimizerPolicy, CommunicationPolicy]:
    """Return the MS-AMP level whose state is nearest to a policy's, and what the package stores and sends there."""
    moments = {policy.optimizer.exp_avg, policy.optimizer.exp_avg_sq}
    name = "O2" if moments & {"e4m3", "e4m3_tensor", "fp16_scaled", "fp16_tensor"} else "O1"
    name = "O3" if policy.optimizer.weights == "e4m3_master" else name
    found = published(f"msamp-{name.lower()}")
    return name, found.optimizer, found.communication


def _runs_te(plans: list[LayerPlan]) -> bool:
    """Say whether the GEMMs are Transformer Engine's (delayed, not powers of two), which MS-AMP runs by ``use_te``."""
    scalings = [recipe.scaling for plan in plans for recipe in plan.scaled]
    return bool(scalings) and all(s is not None and s.scale == "delayed" and not s.power_of_2 for s in scalings)


def write(request: Request, losses: Losses) -> Written:
    """Return ``precision_msamp.py`` and ``ds_msamp.json``."""
    policy = request.policy
    name, optimizer, communication = nearest_level(policy)
    for part, value in policy.optimizer.model_dump(exclude={*STEPPING}).items():
        runs = getattr(optimizer, part)
        if value != runs:
            losses.add(f"optimizer.{part}: {value}", f"{runs} (MS-AMP {name})")
    if policy.communication != communication:
        losses.add(f"communication.gradients: {policy.communication.gradients}", f"fp8 (MS-AMP {name})")
    rules = request.rules()
    names = name_plans(policy, rules)
    own = Words("MS-AMP's own recipe", {"fp8": fast_forward(published("msamp-o1").recipes["fp8_msamp"])})
    lose(losses, request, lambda plan, _: own.lost(plan, "fp8" if plan.scaled else "", policy.activations))
    eight = {names[rule.plan] for rule in rules if rule.plan.scaled}
    wide = {"output": "the autocast dtype: cast the logits in the script"}
    report_settings(request, losses, SCALER, lost=wide, own=("optimizer", "gradients"))
    own_level = "O2" if name == "O3" else name
    values = {"RULES": rule_table(rules, names), "FP8": json.dumps(sorted(eight)), "LEVEL": own_level}
    te = _runs_te([rule.plan for rule in rules])
    section = {"msamp": {"enabled": True, "opt_level": name, "use_te": te}}
    files = {
        "precision_msamp.py": header(request, "MS-AMP") + fill("msamp", request, **values),
        "ds_msamp.json": json.dumps(section, indent=2) + "\n",
    }
    notes = [
        "model, optimizer = precision_msamp.initialize(model, optimizer); with precision_msamp.autocast(): ...",
        "runs in ghcr.io/azure/msamp:v0.4.0-cuda12.2 on H100 only: MS-AMP looks for 'h100' in the device name",
    ]
    if name == "O3":
        notes.append("O3 exists under DeepSpeed ZeRO 1/2 only, by ds_msamp.json; the Python module asks for O2")
    if te:
        notes.append("use_te: under DeepSpeed the GEMMs are Transformer Engine's, in a model built of its layers")
    return files, notes
