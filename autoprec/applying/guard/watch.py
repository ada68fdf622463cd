"""Watch a long training run under a policy, fall back step by step when it leaves its way.

Short trials see early divergence only. The guard looks at what a policy's ``guard`` section names, every few steps; on
a breach it applies the next fallback in the policy's order, logs it, and never stops or breaks the training.

A single high loss is not a divergence; several that lie above all that was usual are (``jump.py``): where losses come
as numbers, or lie on the CPU, that is looked at in every step, else in every look. What is small shows in medians over
the last steps, and counts from where noise ends: three standard errors, taken from the differences between neighbouring
steps.
"""

from __future__ import annotations

import logging
import math
import sys
import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from autoprec.applying.guard.fallback import FALLBACKS, fall_back
from autoprec.applying.guard.jump import LossJump, sigma_of
from autoprec.applying.phases import phases_of
from autoprec.applying.policy import apply_policy, remove_policy
from autoprec.applying.units import tunable_units, unwrap
from autoprec.errors import AutoPrecError, AutoPrecWarning, UnknownNameError
from autoprec.numerics.sharded import world_size
from autoprec.policy import GUARD_METRICS, Policy, resolve

_LOG = logging.getLogger("autoprec.guard")
_JUMP = "loss_jump"


@dataclass(frozen=True, slots=True)
class Breach:
    """A threshold that was crossed at ``step``, and what the guard did: ``action`` is a fallback, or ``none left``."""

    step: int
    metric: str
    value: float
    threshold: float
    action: str


class Guard:
    """Watches one training run.

    >>> import autoprec, torch
    >>> policy, model = autoprec.Policy(activations="bf16"), torch.nn.Linear(16, 16)
    >>> policy.apply(model)
    >>> guard = autoprec.Guard(policy, model)
    >>> for batch in torch.randn(3, 8, 16):  # once per optimizer step
    ...     guard.step(model(batch).square().mean())
    >>> guard.breaches
    []

    Args:
        policy: what the model runs; its ``guard`` section says what to watch, how far it may go, and the fallbacks.
            Without one, all of :data:`~autoprec.policy.GUARD_METRICS` is watched, and all fallbacks are used in order.
        model: the model the policy is applied to, wrapped or not; without it the guard warns but cannot fall back.
        every: steps between two looks; only then are tensors brought to the host from a GPU, and ranks agree:
            in a distributed run every rank calls :meth:`step`.
        window: steps that a median runs over, and the time a fallback is given before the next one.
        patience: looks in a row that a threshold must be crossed before the guard acts.
        backend: backend for the policies that it applies.
        on_breach: called with every :class:`Breach`.
        run_steps: optimizer steps of the whole run; for a policy with phases that is not applied yet.
    """

    def __init__(
        self,
        policy: Policy,
        model: nn.Module | None = None,
        *,
        every: int = 10,
        window: int = 100,
        patience: int = 3,
        backend: str = "auto",
        on_breach: Callable[[Breach], None] | None = None,
        run_steps: int | None = None,
    ) -> None:
        section = policy.guard
        named = section.metrics if section and section.metrics else tuple(GUARD_METRICS)
        given = section.thresholds if section else {}
        if unknown := sorted({*named, *given} - GUARD_METRICS.keys()):
            known = ", ".join(GUARD_METRICS)
            warnings.warn(f"the guard does not watch {', '.join(unknown)}, only {known}", AutoPrecWarning, stacklevel=3)
        self.thresholds = {
            name: float(given.get(name, usual)) for name, usual in GUARD_METRICS.items() if name in {*named, *given}
        }
        self.fallbacks = list(section.fallback if section and section.fallback else FALLBACKS)
        self.policy, self.model = policy, model
        self.every, self.patience, self.backend, self.on_breach = max(1, every), patience, backend, on_breach
        self.steps, self.window = 0, window
        self.breaches: list[Breach] = []
        self.values: dict[str, float] = {}
        self._pending: list[tuple[Any, Any]] = []
        self._losses: deque[float] = deque(maxlen=window)
        self._norms: deque[float] = deque(maxlen=window)
        self._jumps, self._jump = LossJump(window), 0.0
        self._best = math.inf
        self._above: dict[str, int] = {}
        if policy.phases and model is not None and phases_of(model) is None:
            apply_policy(policy, model, backend=backend, strict=False, run_steps=run_steps)

    def step(self, loss: Tensor | float, gradient_norm: Tensor | float | None = None) -> Breach | None:
        """Take in one optimizer step; return the breach this step brought to light, if any. Never raises.

        Args:
            loss: the step's loss; a tensor of shape ``[]`` is not synchronised before the next look.
            gradient_norm: total gradient norm before clipping, e.g. what ``clip_grad_norm_`` returned: likewise.
        """
        try:
            self.steps += 1
            self._pending.append((_detached(loss), _detached(gradient_norm)))
            return self._look() if self.steps % self.every == 0 else self._glance()
        except Exception:  # the guard must never be what ends a training
            _LOG.exception("the guard failed at step %d and looks away until the next one", self.steps)
            return None

    def _glance(self) -> Breach | None:
        """Look for a jump of the loss between two looks, where that waits for no device and no other rank."""
        if world_size() > 1 or any(isinstance(x, Tensor) and x.device.type != "cpu" for x in self._pending[-1]):
            return None
        self._take_in()
        if not self._settled() or self._jump <= self.thresholds.get("loss_gap", math.inf):
            return None
        self.values = {**self.values, "loss_gap": self._jump}
        return self._act("loss_gap")

    def _take_in(self) -> None:
        """Bring what is pending to the host, and note the largest jump of the loss since the last look."""
        for loss, norm in self._pending:
            value = float(loss)
            self._losses.append(value)
            size = None if norm is None else float(norm)
            if size is not None:
                self._norms.append(size)
            self._jump = max(self._jump, self._jumps.add(value, size))
        self._pending = []

    def _settled(self) -> bool:
        """Whether the last fallback has had its time."""
        return not self.breaches or self.steps - self.breaches[-1].step >= self.window

    def _look(self) -> Breach | None:
        self._take_in()
        self.values = _agreed(self._measure(), self.model)
        self._jump = 0.0
        for name, threshold in self.thresholds.items():
            value = self.values.get(name, math.nan)
            self._above[name] = self._above.get(name, 0) + 1 if value > threshold else 0
        _log_to_active_run({f"guard/{name}": value for name, value in self.values.items()}, self.steps)
        enough = {name: self._patience_for(name) for name in self.thresholds}
        crossed = [name for name, count in self._above.items() if self._settled() and count >= enough[name]]
        if crossed:
            return self._act(crossed[0])
        return None

    def _patience_for(self, name: str) -> int:
        """Return the looks that a threshold must be crossed: one is enough for what cannot be noise of the batches."""
        gross = name == "loss_gap" and self.values.get(_JUMP, 0.0) > self.thresholds[name]
        return 1 if gross or name == "nonfinite_steps" else self.patience

    def _measure(self) -> dict[str, float]:
        finite = [loss for loss in self._losses if math.isfinite(loss)]
        values: dict[str, float] = {}
        bad = sum(not math.isfinite(v) for v in (*self._losses, *self._norms))
        values["nonfinite_steps"] = float(bad)
        recent = finite[-max(self.every, 10) :]
        if recent:
            smooth = median(recent)
            self._best = min(self._best, smooth)
            beyond = smooth - self._best - _allowance(finite, len(recent))
            values[_JUMP] = self._jump
            values["loss_gap"] = max(self._jump, beyond / max(abs(self._best), 1e-12), 0.0)
        norms = [norm for norm in self._norms if math.isfinite(norm)]
        if len(norms) >= 2 * self.every:
            values["gradient_norm_ratio"] = median(norms[-self.every :]) / max(median(norms), 1e-30)
        return values

    def _act(self, metric: str) -> Breach:
        action = "none left"
        while self.fallbacks:
            name = self.fallbacks.pop(0)
            if self._apply(name):
                action = name
                break
        breach = Breach(self.steps, metric, self.values[metric], self.thresholds[metric], action)
        self.breaches.append(breach)
        self._above.clear()
        self._losses.clear()
        self._norms.clear()
        self._jumps.clear()
        self._jump = 0.0
        text = f"step {breach.step}: {metric} {breach.value:.4g} is above {breach.threshold:.4g}; fallback: {action}"
        _LOG.warning(text)
        _log_to_active_run(
            {"guard/fallbacks": float(len(self.breaches))}, self.steps, {f"autoprec.guard.{breach.step}": text}
        )
        if self.on_breach is not None:
            self.on_breach(breach)
        return breach

    def _apply(self, name: str) -> bool:
        """Apply a fallback; say whether it changed anything."""
        if self.model is None:
            return False
        layers = list(tunable_units(unwrap(self.model)))
        try:
            stepped = fall_back(self.policy, name, layers)
        except UnknownNameError as error:
            _LOG.warning("%s", error)
            return False
        plans = [[resolve(stage, layers, strict=False) for stage in p.stages] for p in (stepped, self.policy)]
        same = plans[0] == plans[1]
        if same and (name != "script" or stepped == self.policy):
            return False
        return self._install(stepped, name)

    def _install(self, policy: Policy, name: str) -> bool:
        """Exchange the policy on the model for one that a fallback leads to."""
        if self.model is None:
            return False
        phases = phases_of(self.model)
        try:
            if phases is not None:
                phases.replace(policy)
            elif policy == type(policy)():
                remove_policy(self.model)
            else:
                apply_policy(policy, self.model, backend=self.backend, strict=False)
        except AutoPrecError as error:
            _LOG.warning("fallback %s could not be applied: %s", name, error)
            return False
        self.policy = policy
        return True

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint must carry so that a resumed run keeps its fallbacks."""
        return {
            "steps": self.steps,
            "best": self._best,
            "fallbacks": list(self.fallbacks),
            "policy": self.policy.to_dict(),
            "breaches": [asdict(breach) for breach in self.breaches],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from :meth:`state_dict`; the policy it had fallen back to is applied to the model."""
        self.steps, self._best = int(state["steps"]), float(state["best"])
        self.fallbacks = list(state["fallbacks"])
        self.breaches = [Breach(**row) for row in state["breaches"]]
        policy = type(self.policy).model_validate(state["policy"])
        if self.breaches and policy != self.policy:  # else it is there, and what it remembers with it
            self._install(policy, "of the checkpoint")
        self.policy = policy


def _detached(value: Tensor | float | None) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


def _allowance(losses: Sequence[float], count: int) -> float:
    """Return by how much two medians of ``count`` losses differ by noise alone (three standard errors).

    The noise is estimated from differences between neighbours, which a slow trend does not enter.
    """
    return 3 * 1.2533 * sigma_of(losses) * math.sqrt(2 / count)


def _agreed(values: dict[str, float], model: nn.Module | None) -> dict[str, float]:
    """Take the largest value over all ranks, so that every rank falls back at the same step."""
    dist = torch.distributed
    if world_size() == 1:
        return values
    names = sorted({*GUARD_METRICS, _JUMP})
    device = next((p.device for p in model.parameters()), torch.device("cpu")) if model is not None else "cpu"
    packed = torch.tensor([values.get(name, -math.inf) for name in names], dtype=torch.float64, device=device)
    dist.all_reduce(packed, op=dist.ReduceOp.MAX)
    return {name: value for name, value in zip(names, packed.tolist(), strict=True) if value > -math.inf}


def _log_to_active_run(metrics: Mapping[str, float], step: int, tags: Mapping[str, str] | None = None) -> None:
    """Log metrics (finite ones) and tags to the MLflow run that the training has opened; MLflow is never imported."""
    mlflow = sys.modules.get("mlflow")
    if mlflow is None or getattr(mlflow, "active_run", lambda: None)() is None:
        return
    try:
        mlflow.log_metrics({name: value for name, value in metrics.items() if math.isfinite(value)}, step=step)
        if tags:
            mlflow.set_tags(dict(tags))
    except Exception:  # a tracking server must never end a training
        logging.getLogger("autoprec").exception("could not log to MLflow")
