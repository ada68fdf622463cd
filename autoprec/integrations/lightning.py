"""Lightning: ``Trainer(plugins=[PolicyTrainerPrecision("policy.yaml")])`` and the same for Fabric."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

from torch import nn
from torch._compile import _disable_dynamo
from torch.optim import Optimizer

from autoprec.applying.optimizers import own_optimizer, shared
from autoprec.applying.policy import TorchPolicy, load
from autoprec.support.living import living
from autoprec.support.optional import require

_PURPOSE = "a Lightning precision plugin"
FabricPrecision: Any = require("lightning.fabric.plugins.precision", purpose=_PURPOSE).Precision
TrainerPrecision: Any = require("lightning.pytorch.plugins.precision", purpose=_PURPOSE).Precision


class _PolicyPrecision:
    """Applies a policy when Lightning converts the model, and wraps each optimizer before its first step.

    Args:
        policy: a policy, or the path of one.
        prefix: where the model sits inside the LightningModule, e.g. ``model``; a policy's names are relative to it.
        backend: which backend runs the GEMMs.
        run_steps: optimizer steps of the run, where a phase of the policy begins at a share of it. A Trainer with
            ``max_steps`` knows them.
    """

    precision = "32-true"

    def __init__(
        self, policy: TorchPolicy | Path | str, *, prefix: str = "", backend: str = "auto", run_steps: int | None = None
    ) -> None:
        super().__init__()
        self.policy = policy if isinstance(policy, TorchPolicy) else load(policy)
        self.prefix, self.backend, self.run_steps = prefix, backend, run_steps
        self._model: nn.Module | None = None
        self._models: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._wrapped: weakref.WeakSet[Optimizer] = weakref.WeakSet()

    def convert_module(self, module: Any) -> Any:
        """Apply the policy in place and return the module."""
        self._model = module.get_submodule(self.prefix)
        self._models.add(self._model)
        run_steps = self.run_steps or _steps_of(module)
        self.policy.apply(self._model, backend=self.backend, run_steps=run_steps)
        return module

    def optimizer_step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """Wrap an optimizer before its first step, and take the step."""
        self._wrap(optimizer)
        return super().optimizer_step(optimizer, *args, **kwargs)  # type: ignore[misc]

    def _wrap(self, optimizer: Any) -> None:
        if isinstance(optimizer, Optimizer) and optimizer not in self._wrapped:
            self._wrapped.add(optimizer)
            trained = [model for model in self._models if shared(optimizer, model)]
            several = len(trained) > 1
            self.policy.wrap_optimizer(optimizer, None if several else next(iter(trained), self._model))

    def state_dict(self) -> dict[str, Any]:
        """Return what the policy remembers between steps; the Trainer saves it in its checkpoints."""
        return {} if self._model is None else dict(self.policy.state_dict(self._model))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from :meth:`state_dict`."""
        if self._model is not None:
            self.policy.load_state_dict(self._model, state_dict)


def _steps_of(module: Any) -> int | None:
    """Return the ``max_steps`` of the Trainer that a LightningModule belongs to; None where it counts epochs."""
    steps = getattr(getattr(module, "_trainer", None), "max_steps", None)
    return int(steps) if steps is not None and steps > 0 else None


class PolicyFabricPrecision(_PolicyPrecision, FabricPrecision):  # type: ignore[misc]
    """For ``Fabric(plugins=[...])``."""

    _looked = False

    def convert_module(self, module: Any) -> Any:
        """Apply the policy in place and return the module; its optimizers are found before its first forward."""
        self._looked = False
        return super().convert_module(module)

    def convert_input(self, data: Any) -> Any:
        """Wrap the optimizers before the first forward, which is the first that Fabric tells after loading."""
        if not self._looked:
            self._looked = True
            self._wrap_living()
        return super().convert_input(data)

    @_disable_dynamo
    def _wrap_living(self) -> None:
        for optimizer in dict.fromkeys(map(own_optimizer, living(Optimizer))):
            if any(shared(optimizer, model) for model in self._models):
                self._wrap(optimizer)


class PolicyTrainerPrecision(_PolicyPrecision, TrainerPrecision):  # type: ignore[misc]
    """For ``Trainer(plugins=[...])``."""

    def connect(self, model: Any, optimizers: list[Any], lr_schedulers: list[Any]) -> Any:
        """Wrap all optimizers, before a checkpoint is read: at their first steps a run would be under way.

        Args:
            model: the LightningModule.
            optimizers: of the run.
            lr_schedulers: of the run.
        """
        for optimizer in optimizers:
            self._wrap(optimizer)
        return super().connect(model, optimizers, lr_schedulers)
