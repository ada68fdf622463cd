"""One way for a policy onto a live model, and one off it.

:func:`apply_policy` is what ``Policy.apply``, trials, :class:`~autoprec.trial.session.Session`, the guard and the
integrations call; :func:`remove_policy` undoes it. A policy without phases is put on the model once
(:mod:`autoprec.applying.stage`); one with phases is exchanged between two optimizer steps wherever a phase begins
(:mod:`autoprec.applying.phases`). An empty policy changes nothing at all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from autoprec.applying.generating.section import put_rollout, take_off_rollout
from autoprec.applying.optimizers import WRAPPED, optimizers_of, own_optimizer
from autoprec.applying.phases import Phases, phases_of, stop_phases, wrap_for_phases
from autoprec.applying.stage import put_stage, take_off
from autoprec.applying.state import ON, carry_state, load_model_state, model_state, models_of
from autoprec.applying.units import unwrap
from autoprec.errors import UsageError
from autoprec.optim.communication import install_gradient_hook
from autoprec.policy import Policy, load_policy, save_policy
from autoprec.policy.table import policy_table
from autoprec.precision.recipes import KEEP
from autoprec.support.tables import Shown, Table

if TYPE_CHECKING:
    from autoprec.applying.audit import AuditReport


def apply_policy(
    policy: Policy,
    model: nn.Module,
    *,
    backend: str = "auto",
    strict: bool = True,
    run_steps: int | None = None,
    step: int = 0,
    on_change: Callable[[str], None] | None = None,
) -> None:
    """Do what :meth:`TorchPolicy.apply` does, with any policy.

    ``strict`` refuses rules that match nothing and recipes that the backend cannot run. Otherwise such a rule is
    ignored, such a layer is left as the script wrote it, and the audit says why.

    Args:
        policy: any.
        model: is changed in place.
        backend: ``auto`` or a name of :data:`autoprec.backends.BACKENDS`.
        strict: see above.
        run_steps: steps of the whole run: phases may begin at a share of it.
        step: at which the run is.
        on_change: is told of each phase that begins.
    """
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"a policy is applied to a torch.nn.Module, not to this {type(model).__name__}",
            fix="policy.apply(model)",
            code="type",
        )
    put_rollout(policy, model, backend=backend, strict=strict, only_try=True)  # before anything is changed
    if policy.phases:
        phases = Phases(
            policy, model, backend=backend, strict=strict, run_steps=run_steps, step=step, on_change=on_change
        )
        phases.begin()
    else:
        put_stage(policy, model, backend=backend, strict=strict)
        stop_phases(model)
        ON[unwrap(model)] = None
    put_rollout(policy, model, backend=backend, strict=strict)
    _forget_parts(model)
    for optimizer in optimizers_of(model):  # those wrapped before carry from now on what the policy remembers
        carry_state(optimizer)


def remove_policy(model: nn.Module) -> None:
    """Take a policy off again: every module gets its own class back and behaves bit-identically as before."""
    stop_phases(model)
    _forget_parts(model)
    take_off(unwrap(model))
    take_off_rollout(model)


def _forget_parts(model: nn.Module) -> None:
    """Stop policies that were applied to parts of a model: they are replaced, or taken off with it."""
    root = unwrap(model)
    for part in list(ON):
        if part is not root and any(part is module for module in root.modules()):
            stop_phases(part)


class TorchPolicy(Shown, Policy):
    """A policy with methods that act on an ``nn.Module``: the class behind ``autoprec.Policy`` and ``autoprec.load``.

    The data are those of :class:`autoprec.policy.Policy`, which loads no torch.

    Examples:
        >>> import autoprec, torch
        >>> policy = autoprec.Policy.model_validate({
        ...     "recipes": {"bf16": {"format": "bf16"}}, "layers": [{"match": "*", "recipe": "bf16"}]})
        >>> model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Linear(32, 16))
        >>> policy.apply(model)
        >>> model(torch.randn(4, 16)).sum().backward()
        >>> policy.audit(model).ok
        True
        >>> policy.remove(model)
    """

    def table(self) -> Table:
        """Return what each rule runs, GEMM by GEMM: what ``print(policy)`` and a notebook show."""
        return policy_table(self)

    def apply(
        self,
        model: nn.Module,
        backend: str = "auto",
        *,
        run_steps: int | None = None,
        step: int = 0,
        on_change: Callable[[str], None] | None = None,
    ) -> None:
        """Make ``model`` run under this policy, in place; a policy applied earlier is replaced.

        Phases of the policy begin by themselves, counted by the steps of the optimizer that trains the model. Its
        section ``rollout`` goes on the copy of the model that generates, which :func:`autoprec.register` names.

        Args:
            model: the model, wrapped or not.
            backend: ``auto`` or a name of :data:`autoprec.backends.BACKENDS`. On a GPU ``auto`` runs a recipe by what
                the policy was found with (``evidence.backends``), where that is installed and can run the layer.
            run_steps: optimizer steps of the whole run; needed where a phase begins at a share of it.
            step: optimizer steps that were taken before, in a run that is resumed.
            on_change: called with a line of text whenever a phase begins.

        Raises:
            UsageError: a phase begins at a share of a run whose number of steps is not given; or there is a section
                ``rollout``, and no copy of the model was named.
            PolicyError: counted in steps, a phase does not begin after the one before it.
            PolicyMismatchError: a rule that is not optional matches no layer.
            UnsupportedError: a layer cannot run its recipe; the message names layer, recipe and reason.
            UnknownNameError: no such backend.

        Whatever ends it, an interrupt included, the model is then as it was before.
        """
        apply_policy(self, model, backend=backend, run_steps=run_steps, step=step, on_change=on_change)

    def remove(self, model: nn.Module) -> None:
        """Take any policy off ``model``: bit-identical behaviour as before."""
        remove_policy(model)

    def audit(self, model: nn.Module) -> AuditReport:
        """Compare what was asked for with what the last forward and backward really ran, in the phase of now."""
        from autoprec.applying.audit import audit_model

        phases = phases_of(model)
        return audit_model(self.stages[0] if phases is None else phases.current, model)

    def wrap_optimizer(self, optimizer: torch.optim.Optimizer, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Give an optimizer the storage formats this policy asks for; returns the same object.

        Its checkpoints also carry what :meth:`state_dict` returns of every model that it trains, found by their
        parameters in whatever order the policy is applied and the optimizer wrapped; ``model`` says that no other is
        meant. A wrapper's own optimizer (accelerate's) is the one that is wrapped.
        """
        own = own_optimizer(optimizer)
        if not hasattr(own, "param_groups"):
            raise UsageError(
                f"wrap_optimizer takes an optimizer, not this {type(optimizer).__name__}",
                fix="policy.wrap_optimizer(optimizer, model)",
                code="type",
            )
        found = models_of(own) if model is None else [model]
        WRAPPED.add(wrap_for_phases(own, self, found[0] if found else None))
        for other in found[1:]:
            install_gradient_hook(other, self.communication.gradients)
        of_layers = bool(self.layers or self.phases) or (self.default, self.activations) != (KEEP, KEEP)
        carry_state(own, model, asks=of_layers)
        return optimizer

    def state_dict(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """Return what this policy remembers on ``model`` between steps: delayed scales and random streams.

        Needed only where no wrapped optimizer's ``state_dict`` carries it; see :mod:`autoprec.applying.state`.

        Args:
            model: that the policy was applied to.

        Returns:
            Tensors by name: histories ``[length]`` and scales ``[]`` in float32, random streams in uint8.
        """
        return model_state(model)

    def load_state_dict(self, model: nn.Module, state: Mapping[str, torch.Tensor]) -> None:
        """Continue from :meth:`state_dict`; layers that it does not name begin anew, with a warning.

        Args:
            model: that the policy was applied to.
            state: tensors by name, of the shapes that :meth:`state_dict` returned.
        """
        load_model_state(model, state)

    def save(self, path: Path | str) -> Path:
        """Write the policy file (YAML, or JSON by suffix), atomically."""
        return save_policy(self, path)


def load(path: Path | str) -> TorchPolicy:
    """Load a policy file. Data only: nothing is imported or run.

    Raises:
        PolicyError: missing, unreadable, or not a valid policy.

    Examples:
        >>> import autoprec
        >>> from pathlib import Path
        >>> _ = Path("policy.yaml").write_text("schema: autoprec.policy/1\\nactivations: bf16\\n")
        >>> autoprec.load("policy.yaml").activations
        'bf16'
    """
    return load_policy(path, cls=TorchPolicy)
