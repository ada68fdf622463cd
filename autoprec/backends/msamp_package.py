"""The real ``msamp`` package behind AutoPrec's MS-AMP levels, where it can run; AutoPrec's own arithmetic elsewhere.

MS-AMP v0.4 (Azure/MS-AMP, last release February 2024) runs in one environment: its docker image
``ghcr.io/azure/msamp:v0.4.0-cuda12.2`` (torch 2.1, Transformer Engine 1.1) on an H100. Everywhere else it fails to
import, or silently runs no FP8 GEMM (it looks for "h100" in the device name), or would give AdamW the weight decay of
Adam (torch made AdamW a subclass of Adam). So each condition is checked first, and what is not met is a reason.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autoprec.backends.base import Capability
from autoprec.errors import UnsupportedError
from autoprec.levels import LEVELS
from autoprec.optional import require
from autoprec.policy import Policy, resolve

__all__ = ["IMAGE", "MsampRun", "initialize", "opt_level", "usable"]

IMAGE = "ghcr.io/azure/msamp:v0.4.0-cuda12.2"
_LEVELS = {"msamp-o1": "O1", "msamp-o2": "O2", "msamp-o3": "O3"}


@dataclass(frozen=True, slots=True)
class MsampRun:
    """What ``initialize`` returned: the model and optimizer to train with, and who runs them.

    ``ran`` is ``msamp O1`` / ``O2`` / ``O3``, or ``autoprec O1`` ...; ``reason`` says why not the package.
    """

    model: nn.Module
    optimizer: Any
    ran: str
    reason: str = ""


def opt_level(policy: Policy) -> str | None:
    """Return the MS-AMP level (O1, O2, O3) whose state and communication a policy has, or None."""
    for name, level in _LEVELS.items():
        row = LEVELS[name]
        if policy.optimizer == row.optimizer and policy.communication == row.communication:
            return level
    return None


def _adamw_is_adam() -> bool:
    return issubclass(torch.optim.AdamW, torch.optim.Adam)


def usable(optimizer: torch.optim.Optimizer, level: str, device_name: str) -> Capability:
    """Say whether the installed ``msamp`` can train with this optimizer at this level on this device, and why not.

    ``device_name`` as ``torch.cuda.get_device_name()`` gives it; empty without a GPU. Nothing is imported.
    """
    if importlib.util.find_spec("msamp") is None:
        return Capability(False, f"the msamp package is not installed (it is not on PyPI; docker image {IMAGE})")
    if "h100" not in device_name.lower():
        found = device_name or "no GPU"
        return Capability(False, f"msamp runs FP8 GEMMs on devices named H100 only, and silently none on: {found}")
    if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW):
        return Capability(False, f"msamp replaces Adam and AdamW only, not {type(optimizer).__name__}")
    if type(optimizer) is torch.optim.AdamW and _adamw_is_adam():
        return Capability(False, f"msamp would give AdamW the weight decay of Adam under torch {torch.__version__}")
    if "decoupled_weight_decay" in optimizer.defaults:
        return Capability(False, f"msamp does not know this optimizer's options under torch {torch.__version__}")
    if level == "O3" and importlib.util.find_spec("deepspeed") is None:
        return Capability(False, "msamp O3 runs through DeepSpeed 0.13, which is not installed")
    return Capability(True, f"msamp {level} on {device_name}")


def _mark_kept(policy: Policy, model: nn.Module) -> None:
    """Tell msamp which layers to leave alone: its switch is an attribute of the layer."""
    layers = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    plans = resolve(policy, list(layers), strict=False)
    for name, module in layers.items():
        recipe = plans[name].fprop
        if recipe is None or recipe.format != "fp8":
            module.use_fp32_linear = True  # type: ignore[assignment]


def _run_package(model: nn.Module, optimizer: torch.optim.Optimizer, level: str) -> tuple[nn.Module, Any]:
    if level == "O3":
        deepspeed = require("msamp.deepspeed", purpose="MS-AMP O3")
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": 2},
            "msamp": {"enabled": True, "opt_level": "O3", "use_te": False},
        }
        engine, wrapped, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        return engine, wrapped
    package = require("msamp", purpose=f"MS-AMP {level}")
    changed, wrapped = package.initialize(model, optimizer, opt_level=level)
    return changed, wrapped


def initialize(
    policy: Policy, model: nn.Module, optimizer: torch.optim.Optimizer, *, device_name: str | None = None
) -> MsampRun:
    """Train a policy at an MS-AMP level with the package where it can run, else with AutoPrec's own arithmetic.

    With the package, the returned model and optimizer are its own. Without it they are the objects passed in: the
    caller applies the policy and wraps the optimizer as for any policy.

    Raises:
        UnsupportedError: the policy is none of O1, O2, O3.
    """
    level = opt_level(policy)
    if level is None:
        raise UnsupportedError(
            "this policy is none of MS-AMP's levels: their weights, state and communication go together",
            where="policy.optimizer",
            fix="use autoprec.levels.level('msamp-o2').onto(policy), or another backend",
        )
    if device_name is None:
        device_name = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    found = usable(optimizer, level, device_name)
    if not found:
        return MsampRun(model, optimizer, f"autoprec {level}", found.reason)
    _mark_kept(policy, model)
    changed, wrapped = _run_package(model, optimizer, level)
    return MsampRun(changed, wrapped, f"msamp {level}")
