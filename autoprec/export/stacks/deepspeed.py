"""``--to deepspeed``: what the DeepSpeed JSON can say, which is one precision for the whole model.

DeepSpeed has no FP8 key of its own; ``torch_autocast`` runs the model under ``torch.autocast`` and names module
*classes*, not layers.
"""

from __future__ import annotations

import json
from typing import Any

from autoprec.export.base import Export, Losses, Request, state_losses
from autoprec.export.operators import autocast_operators
from autoprec.export.summary import high_dtype, lose_rule

__all__ = ["DeepSpeedExporter"]

_DTYPES = {"bf16": "bfloat16", "fp16": "float16"}


class DeepSpeedExporter:
    """DeepSpeed JSON."""

    name = "deepspeed"
    summary = "DeepSpeed: torch_autocast and communication precision (no FP8, no layers)"

    def export(self, request: Request) -> Export:
        """Return ``ds_config.json``: the precision part of a DeepSpeed configuration."""
        losses = Losses()
        policy = request.policy
        wanted = {high_dtype(request, rule.plan) for rule in request.rules() if not rule.plan.scaled}
        dtype = policy.activations
        config: dict[str, Any] = {}
        if dtype in _DTYPES:
            modules = ["torch.nn.Linear", "torch.nn.Conv1d", "torch.nn.Conv2d", "torch.nn.Conv3d"]
            config["torch_autocast"] = {
                "enabled": True,
                "dtype": _DTYPES[dtype],
                "lower_precision_safe_modules": modules,
            }
        runs = dtype if dtype != "keep" else "as the script wrote it"
        for rule in request.rules():
            if rule.plan.scaled:
                lose_rule(losses, rule, f"{runs} (DeepSpeed has no FP8 key)")
            elif high_dtype(request, rule.plan) not in (dtype, "keep"):
                lose_rule(losses, rule, f"{runs} (DeepSpeed's JSON knows no layers)")
        gradients = policy.communication.gradients
        if gradients == "bf16":
            config["communication_data_type"] = "bf16"
        elif gradients == "fp8":
            losses.add("communication.gradients: fp8", "bf16")
            config["communication_data_type"] = "bf16"
        elif dtype in _DTYPES:
            config["communication_data_type"] = "fp32"
        if policy.loss_scaling == "dynamic" and dtype != "fp16":
            losses.add("loss_scaling: dynamic", "none (DeepSpeed scales the loss for fp16 autocast only)")
        autocast_operators(request, losses, lost="the autocast dtype, also in a loss that the script computes itself")
        state_losses(request, losses, communication=False)
        notes = ["merge into your DeepSpeed configuration; leave its bf16 and fp16 sections off"]
        if wanted - {dtype, "keep"}:
            notes.append("per-layer precision: call autoprec.load(policy).apply(model) before deepspeed.initialize")
        files = {"ds_config.json": json.dumps(config, indent=2) + "\n"}
        return Export(self.name, files, losses.done(), tuple(notes), losses.kept)
