"""``--to lightning``: a ``Precision`` plugin for Fabric and for the Trainer, around the dependency-free module."""

from __future__ import annotations

from autoprec.export.base import Losses, Request, Written
from autoprec.export.naming import header
from autoprec.export.stacks import python

_PLUGIN = '''import precision_policy
from lightning.fabric.plugins.precision import Precision as FabricPrecision
from lightning.pytorch.plugins.precision import Precision as TrainerPrecision


class _PolicyMixin:
    """Applies the policy when Lightning converts the model.

    prefix: where the model sits inside the LightningModule, e.g. "model"; the policy's names are relative to it.
    """

    def __init__(self, prefix=""):
        super().__init__()
        self.prefix = prefix

    def convert_module(self, module):
        precision_policy.apply(module.get_submodule(self.prefix))
        return module


class PolicyFabricPrecision(_PolicyMixin, FabricPrecision):
    """Fabric(plugins=[PolicyFabricPrecision()])."""


class PolicyTrainerPrecision(_PolicyMixin, TrainerPrecision):
    """Trainer(plugins=[PolicyTrainerPrecision(prefix="model")])."""
'''


def write(request: Request, losses: Losses) -> Written:
    """Return ``precision_policy.py`` and ``precision_lightning.py``."""
    files, _ = python.write(request, losses)
    files = {**files, "precision_lightning.py": header(request, "Lightning") + _PLUGIN}
    return files, ("Trainer(plugins=[PolicyTrainerPrecision(prefix='model')])",)
