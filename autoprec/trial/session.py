"""For loops that hooks cannot see: the script names its model and its steps in three lines.

Nothing here does anything but train when the script runs without AutoPrec, so the lines may stay.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autoprec.errors import UsageError

if TYPE_CHECKING:
    import torch
    from torch import nn

    from autoprec.trial.inside.agent import Agent


def _agent() -> Agent | None:
    module = sys.modules.get("autoprec.trial.inside.agent")
    return module.current() if module is not None else None


def register(
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    policy: nn.Module | None = None,
    rollout: nn.Module | None = None,
) -> nn.Module:
    """Name the model (and optimizer) that is trained, where AutoPrec would find another; returns the model.

    In reinforcement learning also the copy of it that generates, into which the script writes its weights: a precision
    policy may have a section for that side. Outside a trial of AutoPrec nothing else happens.

    >>> import autoprec, torch
    >>> teacher, student = torch.nn.Linear(16, 16), torch.nn.Linear(16, 16)
    >>> optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
    >>> autoprec.register(student, optimizer) is student
    True

    Args:
        model: what is trained.
        optimizer: what updates it; None where there is one, or the script updates the weights itself.
        policy: the model, by the name that it has in reinforcement learning.
        rollout: the copy that generates: parameters of the same names and shapes.

    Raises:
        UsageError: not one model is named, or ``rollout`` is not a copy of it.
    """
    named = [one for one in (model, policy) if one is not None]
    if len(named) != 1:
        raise UsageError(
            f"register takes one model, not {len(named) or 'none'}",
            fix="autoprec.register(model), or autoprec.register(policy=model, rollout=rollout)",
        )
    (model,) = named
    if rollout is not None:
        from autoprec.applying.generating.pairs import pair

        pair(model, rollout)
    agent = _agent()
    if agent is not None:
        agent.register(model, [optimizer] if optimizer is not None else agent.hooks.optimizers)
    return model


def report(**values: Any) -> None:
    """Report metrics of the training, such as those of an evaluation, for ``autoprec search --metric NAME``.

    Outside a trial of AutoPrec nothing happens. What a script logs with Hugging Face's Trainer, Lightning, wandb or
    mlflow is reported without this.

    >>> import autoprec
    >>> autoprec.report(eval_loss=2.31, **{"eval/accuracy": 0.42})

    Args:
        values: numbers, or tensors of one element, by name.

    Raises:
        UsageError: in a trial, a value is something else.
    """
    agent = _agent()
    if agent is not None and agent.mode != "run":  # a run under a policy is not a trial
        agent.reports.report(values)


class Session:
    """A training loop in AutoPrec's terms: for scripts whose loop hooks cannot see.

    >>> import autoprec, torch
    >>> model = torch.nn.Linear(16, 16)
    >>> policy = autoprec.Policy(activations="bf16")  # or the name of a file
    >>> session = autoprec.Session(model, torch.optim.SGD(model.parameters(), lr=0.1), policy=policy)
    >>> for batch in torch.randn(3, 8, 16):
    ...     session.step(model(batch).square().mean())

    Args:
        model: what is trained.
        optimizer: what updates it; None where the loop updates weights itself (use :meth:`observe`).
        policy: a policy, or a policy file, applied at once. In a trial of AutoPrec the trial's own is used instead.
        backend: which backend runs the GEMMs.
        run_steps: optimizer steps of the whole run, where a phase of the policy begins at a share of it.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        policy: Any = None,
        *,
        backend: str = "auto",
        run_steps: int | None = None,
    ) -> None:
        self.model, self.optimizer = model, optimizer
        self._phases: Any = None
        register(model, optimizer)
        agent = _agent()
        if agent is not None and optimizer is None:
            agent.hooks.steps_reported = True
        if policy is not None and _agent() is None:
            from autoprec.applying.phases import phases_of
            from autoprec.applying.policy import load

            chosen = load(policy) if isinstance(policy, (str, Path)) else policy
            chosen.apply(model, backend=backend, run_steps=run_steps)
            if optimizer is not None:
                chosen.wrap_optimizer(optimizer, model)
            else:
                self._phases = phases_of(model)  # no optimizer counts its steps

    def step(self, loss: torch.Tensor) -> None:
        """Run backward, update the weights, and clear the gradients.

        Args:
            loss: the loss, of shape ``[]``.
        """
        loss.backward()  # type: ignore[no-untyped-call]
        if self.optimizer is not None:
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        self._boundary()

    def observe(self, loss: torch.Tensor) -> None:
        """Tell that a step has ended which the loop did by itself (an engine, ``torch.autograd.grad``, ...).

        Args:
            loss: the loss, of shape ``[]``.
        """
        agent = _agent()
        if agent is not None:
            events = agent.hooks.events
            events.before_backward((loss,))
            events.after_backward((loss,))
            if self.optimizer is not None:
                events.gradients_ready(self.optimizer)
                events.after_step(self.optimizer)
        self._boundary()

    def _boundary(self) -> None:
        if self._phases is not None:
            self._phases.advance()
        agent = _agent()
        if agent is not None:
            agent.boundary(self.model)
