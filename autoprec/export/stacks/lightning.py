"""``--to lightning``: a ``Precision`` plugin for Fabric and for the Trainer, around the dependency-free module."""

from __future__ import annotations

from dataclasses import replace

from autoprec.export.base import Export, Request
from autoprec.export.naming import header
from autoprec.export.stacks.python import PythonExporter

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


class LightningExporter:
    """Lightning: Fabric and Trainer."""

    name = "lightning"

    def export(self, request: Request) -> Export:
        """Return ``precision_policy.py`` and ``precision_lightning.py``."""
        module = PythonExporter().export(request)
        files = {**module.files, "precision_lightning.py": header(request, "Lightning") + _PLUGIN}
        use = "Trainer(plugins=[PolicyTrainerPrecision(prefix='model')])"
        return replace(module, target=self.name, files=files, notes=(use,))
