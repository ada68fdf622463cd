"""``--to accelerate``: the YAML that ``accelerate launch`` reads, and the Python kwargs that per-layer rules need.

The YAML has no key for a single layer, so the rules travel in ``AORecipeKwargs`` (and in a conversion before
``prepare`` for recipes beside the main one). Lists, not tuples: accelerate's own documentation shows tuples, which its
YAML reader takes for text. accelerate converts with torchao's own forward, which cannot leave one product of a layer
in high precision: layers that do are converted before ``prepare``. A policy that is one delayed recipe for every layer
becomes the Transformer Engine backend.
"""

from __future__ import annotations

from typing import Any

from autoprec.export.base import Losses, Request, Written
from autoprec.export.naming import header, name_plans
from autoprec.export.settings import IN_FORWARD, report_settings
from autoprec.export.snippets import fill
from autoprec.export.stacks.torchao import nearest_float8, torchao_source
from autoprec.export.stacks.transformer_engine import builtin_plan, fp8_format, keywords
from autoprec.export.summary import changes, lose, main_plan
from autoprec.policy import LayerPlan, dump_yaml
from autoprec.precision.recipes import GEMMS

#: What ``accelerate launch`` refuses to start without; its command line overrides each of them.
_ONE_PROCESS: dict[str, Any] = {
    "compute_environment": "LOCAL_MACHINE",
    "distributed_type": "NO",
    "machine_rank": 0,
    "num_machines": 1,
    "num_processes": 1,
}


def _delayed_everywhere(request: Request, plan: LayerPlan | None) -> bool:
    if plan is None or any(rule.plan.scaled and rule.plan != plan for rule in request.rules()):
        return False
    runs = [recipe.scaling for recipe in builtin_plan(plan.scaled[0]).scaled]
    alike = {recipe.model_copy(update={"accumulation": "full"}) for recipe in plan.scaled}
    return len(alike) == 1 and any(scaling is not None and scaling.scale == "delayed" for scaling in runs)


def _te_config(request: Request, plan: LayerPlan, losses: Losses) -> dict[str, Any]:
    """Return the fp8_config of the Transformer Engine backend, which converts every linear layer."""
    recipe = plan.scaled[0]
    runs = builtin_plan(recipe)
    why = "the Transformer Engine backend runs its own recipe in every linear layer"
    lose(losses, request, lambda plan, _: changes(plan, runs, "bf16", request.policy.activations), why)
    return {
        "backend": "TE",
        "fp8_format": fp8_format(recipe),
        **keywords(runs.scaled[0]),
        "override_linear_precision": [False, False, False],
        "use_autocast_during_eval": False,
    }


def write(request: Request, losses: Losses) -> Written:
    """Return ``accelerate_config.yaml`` and, unless the backend is Transformer Engine, a Python module."""
    policy = request.policy
    main = main_plan(request)
    delayed = main is not None and _delayed_everywhere(request, main)
    files: dict[str, str] = {}
    converts = main is not None and len(nearest_float8(main, policy.activations).scaled) == len(GEMMS)
    fp16 = policy.activations == "fp16" and not (delayed or converts)
    kept = {"output": "accelerate casts the model's output to fp32", "attention": "" if delayed else IN_FORWARD}
    eight = "bf16: accelerate's FP8 runs under bf16 autocast" if delayed or converts else ""
    said = "accelerate scales the loss under fp16, and only there"
    report_settings(request, losses, said, scales=fp16, kept=kept, activations=eight)
    if main is not None and delayed:
        if "operators.norm: fp32" in losses.kept:
            losses.kept["operators.norm: fp32"] = "Transformer Engine's own LayerNorm kernels compute in fp32"
        document: dict[str, Any] = {"mixed_precision": "fp8", "fp8_config": _te_config(request, main, losses)}
    elif main is not None and converts:
        name = name_plans(policy, request.rules())[main]
        source = torchao_source(request, losses)
        files["precision_accelerate.py"] = source + fill("accelerate_8_bits", request, MAIN=f'"{name}"')
        settings = {"backend": "AO", "pad_inner_dim": True, "enable_fsdp_float8_all_gather": False}
        document = {"mixed_precision": "fp8", "fp8_config": settings}
    else:
        mixed = {"keep": "no"}.get(policy.activations, policy.activations)
        source = torchao_source(request, losses)
        files["precision_accelerate.py"] = source + fill("accelerate_16_bits", request, MIXED=f'"{mixed}"')
        document = {"mixed_precision": mixed}
    text = header(request, "accelerate") + dump_yaml(_ONE_PROCESS | document)
    files = {"accelerate_config.yaml": text, **files}
    notes = [
        "accelerate launch --config_file accelerate_config.yaml train.py; on several GPUs of one machine: "
        "accelerate launch --multi_gpu --num_processes N --config_file accelerate_config.yaml train.py"
    ]
    if "precision_accelerate.py" in files:
        notes.append("the YAML alone knows no layers: use Accelerator(**precision_accelerate.accelerator_kwargs())")
    return files, notes
