"""A policy that changes during the run, carried out on the live model.

Neither a model nor a policy counts steps, so the optimizer has to: every ``torch.optim`` optimizer calls a hook after
its step. One hook for the whole process asks whether the optimizer trains this model, counts, and exchanges the
policy where a phase begins: between two steps, on the same modules and Parameters. Layers whose plan stays the same
keep their executions, delayed scales and random streams included, and optimizer state is converted in place, so that
nothing is restarted; compiled code is traced once more at each boundary. Every stage is bound to its backend before the
first step: what cannot run is refused then, and not after four fifths of a run.
"""

from __future__ import annotations

import logging
import warnings
import weakref
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from autoprec.applying.optimizers import shared
from autoprec.applying.stage import put_stage
from autoprec.applying.state import ON, begin_phases, models_of
from autoprec.applying.units import unwrap
from autoprec.errors import AutoPrecError
from autoprec.optim.checkpoint import parameters_of
from autoprec.optim.communication import install_gradient_hook
from autoprec.optim.guard import only_makes_state
from autoprec.optim.optimizer import check_optimizer, rewrap_optimizer, wrap_optimizer
from autoprec.policy import Policy, boundaries

_LOG = logging.getLogger("autoprec.phases")


def _train_the_same(first: Optimizer, second: Optimizer) -> bool:
    held = {id(parameter) for parameter in parameters_of(first)}
    return any(id(parameter) in held for parameter in parameters_of(second))


class Phases:
    """Carries out the phases of one policy on one model.

    Args:
        policy: the policy; its base runs until its first phase begins.
        model: the model, wrapped or not.
        backend, strict: as :func:`autoprec.applying.policy.apply_policy` takes them.
        run_steps: optimizer steps of the whole run; needed where a phase begins at a share of it.
        step: optimizer steps that were taken before (a resumed run).
        on_change: called with a line of text whenever a phase begins.

    Raises:
        UsageError: the number of steps is needed and not known.
        PolicyError, PolicyMismatchError, UnsupportedError: a stage cannot run on this model.
    """

    def __init__(
        self,
        policy: Policy,
        model: nn.Module,
        *,
        backend: str = "auto",
        strict: bool = True,
        run_steps: int | None = None,
        step: int = 0,
        on_change: Callable[[str], None] | None = None,
    ) -> None:
        self.starts = boundaries(policy, run_steps)
        self.stages: Sequence[Policy] = policy.stages
        self.policy, self.run_steps, self.step = policy, run_steps, step
        self._model, self._root = weakref.ref(model), weakref.ref(unwrap(model))
        self._put = partial(put_stage, backend=backend, strict=strict)
        self._on_change = on_change
        self._optimizers: list[weakref.ref[Optimizer]] = []
        self._strangers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._since: weakref.WeakSet[Optimizer] = weakref.WeakSet()  # those that stepped since the one that counts
        self._index = self._stage_at(step)

    # ---------------------------------------------------------------- begin and end
    def begin(self) -> None:
        """Put the stage of now on the model, and count from here on."""
        model = self._model()
        assert model is not None
        for stage in self.stages:
            self._put(stage, model, only_try=True)
        if any(stage.communication.gradients != "fp32" for stage in self.stages):
            install_gradient_hook(model, "fp32", reserve=True)  # DDP takes one before the first step, or never
        stop_phases(model)
        self._put(self.current, model)
        _count_steps()
        ON[unwrap(model)] = self

    @property
    def current(self) -> Policy:
        """The stage that runs now, without phases."""
        return self.stages[self._index]

    def _stage_at(self, step: int) -> int:
        return max(index for index, start in enumerate(self.starts) if start <= step)

    # ---------------------------------------------------------------- optimizers
    def know(self, optimizer: Optimizer) -> None:
        """Learn of an optimizer that trains this model; its state follows the phases from now on.

        Raises:
            UnsupportedError, PolicyMismatchError: it cannot do what a later stage asks of it.
        """
        if all(ref() is not optimizer for ref in self._optimizers):
            for stage in self.stages:
                check_optimizer(optimizer, stage, self._model() or self._root())
            self._optimizers.append(weakref.ref(optimizer))

    def _trains_this_model(self, optimizer: Optimizer) -> bool:
        if optimizer in self._strangers:
            return False
        if any(ref() is optimizer for ref in self._optimizers):
            return True
        held = [found for ref in (self._model, self._root) if (found := ref()) is not None]
        if not any(shared(optimizer, found) for found in held):
            self._strangers.add(optimizer)
            return False
        self.know(optimizer)
        if self.step == 0:  # a checkpoint was loaded; the caller counts the step that has just been taken
            self.step = max(0, steps_taken(optimizer) - 1)
        return True

    def after_step(self, optimizer: Optimizer) -> None:
        """Count the step of an optimizer, where it trains this model; the first known is the one that counts."""
        primary = next((found for ref in self._optimizers if (found := ref()) is not None), None)
        if not self._trains_this_model(optimizer) or only_makes_state(optimizer):
            return
        if primary is None or optimizer is primary:
            self._since.clear()
            self.advance()
        elif optimizer in self._since and _train_the_same(optimizer, primary):
            # a script makes another optimizer for its next stage, and something may hold the first: a schedule, a list
            others = [ref for ref in self._optimizers if ref() not in (optimizer, primary, None)]
            self._optimizers = [weakref.ref(optimizer), *others]
            self._since.clear()
            self.resume(self.step + 2)
        else:
            self._since.add(optimizer)

    # ---------------------------------------------------------------- steps
    def advance(self) -> None:
        """Count an optimizer step; where a phase begins after it, it is put on the model."""
        self.resume(self.step + 1)

    def resume(self, step: int) -> None:
        """Continue as after ``step`` optimizer steps."""
        self.step = step
        index = self._stage_at(step)
        if index != self._index:
            self._index = index
            self._exchange()

    def replace(self, policy: Policy) -> None:
        """Carry out another policy with the same boundaries from this step on (a guard that falls back)."""
        self.policy, self.stages = policy, policy.stages
        self._exchange()

    def _exchange(self) -> None:
        model, stage = self._model() or self._root(), self.current
        if model is None:
            return
        try:
            self._put(stage, model, keep=True)
            for ref in self._optimizers:
                optimizer = ref()
                if optimizer is not None:
                    rewrap_optimizer(optimizer, stage, model)
        except AutoPrecError as error:  # all was tried before the first step, so the script has changed its model
            warnings.warn(f"the policy's phase of step {self.step} could not begin: {error}", stacklevel=2)
            return
        text = self.describe()
        _LOG.info(text)
        if self._on_change is not None:
            self._on_change(text)

    def describe(self) -> str:
        """Return where in the run this is, in one line."""
        of = "" if self.run_steps is None else f" of {self.run_steps}"
        if self._index == 0:
            return f"step {self.step}{of}: the policy as it begins"
        return f"step {self.step}{of}: the policy's phase from {self.policy.phases[self._index - 1].label} begins"

    # ---------------------------------------------------------------- checkpoints
    def state(self) -> dict[str, Tensor]:
        """Return what a checkpoint must carry: ``step``, float64 of shape ``[]``."""
        return {"step": torch.tensor(float(self.step), dtype=torch.float64)}

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Continue from :meth:`state`, optimizers too.

        Args:
            state: ``step``, of shape ``[]``; nothing changes without.
        """
        if "step" in state:
            self.resume(int(state["step"]))


def phases_of(model: nn.Module) -> Phases | None:
    """Return the phases at work on a model, or None."""
    return ON.get(unwrap(model))


def stop_phases(model: nn.Module) -> None:
    """Carry out no phases on a model any more, on which stays what is; a no-op where there are none."""
    ON.pop(unwrap(model), None)


@cache
def _count_steps() -> None:
    """Register the hook that tells every phases of steps, once and for good.

    Hooks of the process that come and go with models would do so while torch iterates over them.
    """
    register_optimizer_step_post_hook(_after_step)


def _after_step(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
    for counted in list(ON.values()):
        if counted is not None:
            counted.after_step(optimizer)


def wrap_for_phases(optimizer: Optimizer, policy: Policy, model: nn.Module | None) -> Optimizer:
    """Wrap an optimizer for the stage that runs now; later ones follow by themselves where phases are at work.

    Args:
        optimizer: of the model.
        policy: whose phases they are.
        model: that the policy was applied to; None where it is not known.
    """
    found = None if model is None else phases_of(model)
    if found is None:
        return wrap_optimizer(optimizer, policy, model=model)
    begin_phases(models_of(optimizer), optimizer.param_groups)  # of a checkpoint that was loaded before
    found.know(optimizer)
    if found.step == 0:
        found.resume(steps_taken(optimizer))
    return wrap_optimizer(optimizer, found.current, model=model)


def steps_taken(optimizer: Optimizer) -> int:
    """Return how many steps the state of an optimizer has seen; 0 where it does not say."""
    for state in optimizer.state.values():
        step = state.get("step") if isinstance(state, dict) else None
        if step is not None:
            return int(step)
    return 0
