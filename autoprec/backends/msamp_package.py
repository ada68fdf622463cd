"""The real ``msamp`` package behind AutoPrec's MS-AMP levels, where it can run; AutoPrec's own arithmetic elsewhere.

MS-AMP v0.4 (Azure/MS-AMP, last release February 2024) runs in one environment: its docker image
``ghcr.io/azure/msamp:v0.4.0-cuda12.2`` (torch 2.1, Transformer Engine 1.1) on an H100. The adapter in
:mod:`autoprec.backends.msamp` checks every condition; here a policy is turned into one of its levels, and where the
package cannot run, the reason is kept and AutoPrec's own arithmetic does it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autoprec.backends.msamp import MsampBackend
from autoprec.errors import MissingDependencyError, UnsupportedError
from autoprec.policy import Policy, resolve
from autoprec.policy.levels import LEVELS
from autoprec.support.optional import require

__all__ = ["MsampRun", "initialize", "opt_level"]

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


def _mark_kept(policy: Policy, model: nn.Module) -> list[nn.Module]:
    """Tell msamp which layers to leave alone: its switch is an attribute of the layer. Returns those layers."""
    marked: list[nn.Module] = []
    layers = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    plans = resolve(policy, list(layers), strict=False)
    for name, module in layers.items():
        recipe = plans[name].fprop
        if recipe is None or recipe.format != "fp8":
            module.use_fp32_linear = True  # type: ignore[assignment]
            marked.append(module)
    return marked


def _through_deepspeed(model: nn.Module, optimizer: torch.optim.Optimizer, device: str) -> tuple[nn.Module, Any]:
    """Run O3, which exists through MS-AMP's wrapper around DeepSpeed only."""
    available = MsampBackend().available(device)
    if not available:
        raise UnsupportedError(available.reason)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 2},
        "msamp": {"enabled": True, "opt_level": "O3", "use_te": False},
    }
    package = require("msamp.deepspeed", purpose="MS-AMP O3")
    engine, wrapped, *_ = package.initialize(model=model, optimizer=optimizer, config=config)
    return engine, wrapped


def initialize(policy: Policy, model: nn.Module, optimizer: torch.optim.Optimizer, *, device: str = "cuda") -> MsampRun:
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
            fix="use autoprec.policy.levels.level('msamp-o2').onto(policy), or another backend",
        )
    marked = _mark_kept(policy, model)
    try:
        if level == "O3":
            changed, wrapped = _through_deepspeed(model, optimizer, device)
        else:
            changed, wrapped = MsampBackend().initialize(model, optimizer, level, device=device)
    except (UnsupportedError, MissingDependencyError) as error:
        for module in marked:
            del module.use_fp32_linear
        return MsampRun(model, optimizer, f"autoprec {level}", error.what)
    return MsampRun(changed, wrapped, f"msamp {level}")
