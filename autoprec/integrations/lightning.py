"""Lightning: ``Trainer(plugins=[PolicyTrainerPrecision("policy.yaml")])`` and the same for Fabric."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from autoprec.applying.policy import Policy, load
from autoprec.support.optional import require

_PURPOSE = "a Lightning precision plugin"
FabricPrecision: Any = require("lightning.fabric.plugins.precision", purpose=_PURPOSE).Precision
TrainerPrecision: Any = require("lightning.pytorch.plugins.precision", purpose=_PURPOSE).Precision

__all__ = ["PolicyFabricPrecision", "PolicyTrainerPrecision"]


class _PolicyPrecision:
    """Applies a policy when Lightning converts the model.

    Args:
        policy: a policy, or the path of one.
        prefix: where the model sits inside the LightningModule, e.g. ``model``; a policy's names are relative to it.
        backend: who runs the GEMMs.
    """

    precision = "32-true"

    def __init__(self, policy: Policy | Path | str, *, prefix: str = "", backend: str = "auto") -> None:
        super().__init__()
        self.policy = policy if isinstance(policy, Policy) else load(policy)
        self.prefix, self.backend = prefix, backend

    def convert_module(self, module: Any) -> Any:
        """Apply the policy in place and return the module."""
        self.policy.apply(module.get_submodule(self.prefix), backend=self.backend)
        return module


class PolicyFabricPrecision(_PolicyPrecision, FabricPrecision):  # type: ignore[misc]
    """For ``Fabric(plugins=[...])``."""


class PolicyTrainerPrecision(_PolicyPrecision, TrainerPrecision):  # type: ignore[misc]
    """For ``Trainer(plugins=[...])``."""
