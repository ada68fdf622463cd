"""``--to deepspeed``: what the DeepSpeed JSON can say, which is one precision for the whole model.

DeepSpeed has no FP8 key of its own; ``torch_autocast`` runs the model under ``torch.autocast`` and names module
*classes*, not layers.
"""

from __future__ import annotations

import json
from typing import Any

from autoprec.export.base import Losses, Request, Written
from autoprec.export.settings import report_settings
from autoprec.export.summary import changes, lose
from autoprec.policy import LayerPlan

_DTYPES = {"bf16": "bfloat16", "fp16": "float16"}

#: Gradients of these modules travel in the autocast dtype; the empty list sends every gradient in fp32.
#: ``communication_data_type`` is not read once ``torch_autocast`` is on.
_LINEAR = ["torch.nn.Linear", "torch.nn.Conv1d", "torch.nn.Conv2d", "torch.nn.Conv3d"]


def write(request: Request, losses: Losses) -> Written:
    """Return ``ds_config.json``: the precision part of a DeepSpeed configuration."""
    policy = request.policy
    dtype = policy.activations
    config: dict[str, Any] = {}
    gradients = policy.communication.gradients
    if dtype in _DTYPES:
        config["torch_autocast"] = {
            "enabled": True,
            "dtype": _DTYPES[dtype],
            "lower_precision_safe_modules": [] if gradients == "fp32" else _LINEAR,
        }
    lose(losses, request, lambda plan, _: changes(plan, LayerPlan(), dtype), "DeepSpeed's JSON knows no layers, no FP8")
    layered = bool(losses.found)
    if gradients != "fp32":
        sent = dtype if dtype in _DTYPES else "bf16"
        if dtype not in _DTYPES:
            config["communication_data_type"] = sent
        if gradients != sent:
            losses.add(f"communication.gradients: {gradients}", sent)
    report_settings(
        request,
        losses,
        "DeepSpeed scales the loss under fp16 autocast, and only there",
        scales=dtype == "fp16",
        lost={"output": "the autocast dtype, also in a loss that the script computes itself"},
        own=("gradients",),
    )
    notes = ["merge into your DeepSpeed configuration; leave its bf16 and fp16 sections off"]
    if layered:
        notes.append("per-layer precision: call autoprec.load(policy).apply(model) before deepspeed.initialize")
    return {"ds_config.json": json.dumps(config, indent=2) + "\n"}, notes
