"""The ``msamp`` adapter: MS-AMP, where it exists at all.

MS-AMP (v0.4.0, February 2024) is on no package index, needs torch 2.1, Transformer Engine 1.1 and its own NCCL, and
converts model and optimizer together; it cannot run single layers. So it is offered as a conversion of a whole model,
every precondition of which is checked first, and refuses layer plans. Its numerics without the package are the levels
of ``autoprec.policy.levels``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from autoprec.backends.base import Backend, Capability, Execution
from autoprec.errors import UnsupportedError
from autoprec.policy import LayerPlan
from autoprec.precision.recipes import Gemm, Recipe
from autoprec.support.optional import installed_version, is_available, require

__all__ = ["MsampBackend"]

_FIX = "use a level such as 'O2' (autoprec.policy.levels: same numerics, plain torch), or MS-AMP's docker image"


class MsampBackend(Backend):
    """MS-AMP's own conversion of a model and its optimizer."""

    name = "msamp"

    def available(self, device: str) -> Capability:
        """Say whether MS-AMP can run here; it looks for 'h100' in the device's name and falls back silently."""
        if not is_available("msamp"):
            return Capability(False, "msamp is not installed, and no package index has it")
        if not device.startswith("cuda") or not torch.cuda.is_available():
            return Capability(False, "MS-AMP needs a CUDA device")
        name = torch.cuda.get_device_name(device)
        if "h100" not in name.lower():
            return Capability(False, f"MS-AMP runs FP8 on devices named H100 only, this one is '{name}'")
        if issubclass(torch.optim.AdamW, torch.optim.Adam):
            return Capability(False, "with this torch MS-AMP would replace AdamW's weight decay by Adam's")
        return Capability(True, f"msamp {installed_version('msamp') or ''}".strip())

    def capability(self, recipe: Recipe, *, gemm: Gemm, m: int, k: int, n: int, device: str) -> Capability:
        """Never: MS-AMP has no choice per layer or GEMM."""
        del recipe, gemm, m, k, n
        found = self.available(device)
        return Capability(False, found.reason if not found else "MS-AMP converts whole models, not single GEMMs")

    def bind(self, plan: LayerPlan, module: nn.Module, *, name: str, seed: int) -> Execution:
        """Refuse: there is nothing per layer to bind.

        Raises:
            UnsupportedError: always.
        """
        del plan, module, seed
        raise UnsupportedError("MS-AMP converts whole models, not single layers", where=f"layer '{name}'", fix=_FIX)

    def initialize(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, level: str, *, device: str = "cuda"
    ) -> tuple[nn.Module, Any]:
        """Convert a model and its optimizer by ``msamp.initialize``.

        Args:
            model: the model, already on its device.
            optimizer: exactly ``torch.optim.Adam`` or ``AdamW``.
            level: O1 or O2 (O3 exists through DeepSpeed, Megatron and FSDP only).
            device: where the model is.

        Raises:
            UnsupportedError: with the reason MS-AMP would fail, or silently do something else.
        """
        found = self.available(device)
        reason = "" if found else found.reason
        if level not in ("O1", "O2"):
            reason = f"msamp.initialize knows O1 and O2, not {level}"
        elif type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW):
            reason = f"MS-AMP converts Adam and AdamW only, not {type(optimizer).__name__}"
        if reason:
            raise UnsupportedError(reason, where="backend 'msamp'", fix=_FIX)
        converted = require("msamp", purpose="backend 'msamp'").initialize(model, optimizer, opt_level=level)
        return converted[0], converted[1]
