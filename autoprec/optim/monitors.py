"""Watch what low-precision weights and state do to training, because a short loss curve can flatter them.

A second moment that stalls low makes updates too large, which *improves* the loss of a 300-step trial and ruins a long
run. Gradient errors do not see it either. So a few steps of every trial are watched from the inside:

``lost_updates``        share of the intended weight change that the stored weights did not make (projection on it);
``lost_state_updates``  the same for the second moment: 1 when it is frozen;
``flushed_state``       share of second moments that are zero although the gradient is not (they divide by epsilon);
``skipped_steps``       steps the guard or the loss scaler left out.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from autoprec.optim.guard import before_update
from autoprec.optim.optimizer import runtime_of, skipped_steps
from autoprec.optim.tensor import decoded

#: What a healthy run stays below (measured: benchmarks/results/2026-11-22_state.json), and what is wrong beyond it.
LIMITS: dict[str, tuple[float, str]] = {
    "lost_updates": (0.10, "of the weight updates are lost in rounding"),
    "lost_state_updates": (0.25, "of the second moment's updates are lost: it stalls"),
    "flushed_state": (1e-3, "of the second moments are flushed to zero"),
    "skipped_share": (0.05, "of the steps were skipped"),
}


@dataclass(frozen=True, slots=True)
class StateReport:
    """Means over the watched steps."""

    lost_updates: float = 0.0
    lost_state_updates: float = 0.0
    flushed_state: float = 0.0
    skipped_steps: int = 0
    steps: int = 0
    watched: int = 0

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form."""
        return asdict(self)

    @property
    def _shares(self) -> dict[str, float]:
        return asdict(self) | {"skipped_share": self.skipped_steps / max(self.steps, 1)}

    def problems(self) -> list[str]:
        """Return what is wrong, each in a sentence; empty for a healthy run."""
        found = self._shares
        return [
            f"{found[name]:.1%} {text} (limit {limit:.1%})"
            for name, (limit, text) in LIMITS.items()
            if found[name] > limit
        ]

    def penalty(self) -> float:
        """Return what a trial's divergence must be increased by: 0 for a healthy run, else the worst excess.

        It has the unit of divergence (relative), so that a stalled or flushed state cannot win by a lower loss.
        """
        found = self._shares
        return max(0.0, *(found[name] - limit for name, (limit, _) in LIMITS.items()))


class StateMonitor:
    """Watch every ``every``-th step of one optimizer, wrapped or plain, through its step hooks.

    Costs one copy of the weights and moments during a watched step and nothing otherwise. ``report()`` may be called
    at any time; ``remove()`` takes the hooks off.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, *, every: int = 10) -> None:
        self.optimizer, self.every = optimizer, max(1, every)
        self.steps = self.watched = 0
        self._flushed = self._seen = 0
        #: of each watched step the share of the intended change that was made, of weights and of second moments
        self._weights: list[float] = []
        self._seconds: list[float] = []
        self._before: list[tuple[Tensor, Tensor, Tensor | None, Tensor]] = []
        self._skipped = skipped_steps(optimizer)
        self._handles = [
            optimizer.register_step_pre_hook(before_update(self._pre)),
            optimizer.register_step_post_hook(self._post),
        ]
        self._meant: dict[int, tuple[Tensor, Tensor | None]] = {}

    def remove(self) -> None:
        """Take the hooks off the optimizer."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _pre(self, _optimizer: torch.optim.Optimizer) -> None:
        self._before, self._meant = [], {}
        if self.steps % self.every:
            return
        runtime = runtime_of(self.optimizer)
        if runtime is not None:
            runtime.observer = self._observe
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.dim() >= 2 and parameter.grad is not None and not parameter.grad.is_sparse:
                    state = self.optimizer.state.get(parameter, {})
                    gradient = decoded(parameter.grad).detach().float().clone()
                    self._before.append((parameter, self._exact(parameter), _copy(state.get("exp_avg_sq")), gradient))

    def _observe(self, parameter: Tensor, weight: Tensor, second: Tensor | None) -> None:
        self._meant[id(parameter)] = (weight.clone(), None if second is None else second.clone())

    def _post(self, _optimizer: Any, _args: Any, _kwargs: Any) -> None:
        runtime = runtime_of(self.optimizer)
        if runtime is not None:
            runtime.observer = None
        self.steps += 1
        before, self._before = self._before, []
        if not before or skipped_steps(self.optimizer) != self._skipped:
            self._skipped = skipped_steps(self.optimizer)
            return
        shares = [0.0, 0.0, 0.0, 0.0]
        for one in before:
            shares = [total + more for total, more in zip(shares, self._compare(*one), strict=True)]
        if shares[1]:
            self._weights.append(shares[0] / shares[1])
        if shares[3]:
            self._seconds.append(shares[2] / shares[3])
        self.watched += 1

    def _compare(
        self, parameter: Tensor, weight: Tensor, second: Tensor | None, gradient: Tensor
    ) -> tuple[float, float, float, float]:
        """Count this parameter; return (made, meant) of its weight and of its second moment."""
        after, now = self._exact(parameter), _copy(self.optimizer.state.get(parameter, {}).get("exp_avg_sq"))
        meant_weight, meant_second = self._meant.pop(id(parameter), (after, None))
        second_share = (0.0, 0.0)
        if now is not None:
            self._flushed += int(((now == 0) & (gradient != 0)).sum())
            self._seen += now.numel()
            if meant_second is not None and second is not None:
                second_share = _projection(now - second, meant_second - second)
        return *_projection(after - weight, meant_weight - weight), *second_share

    def _exact(self, parameter: Tensor) -> Tensor:
        """Return a copy of the value the optimizer updates (masters and compensation included), as FP32."""
        runtime = runtime_of(self.optimizer)
        return parameter.detach().float().clone() if runtime is None else runtime.weights.read(parameter).clone()

    def report(self) -> StateReport:
        """Return what was seen so far."""
        return StateReport(
            lost_updates=_lost(self._weights),
            lost_state_updates=_lost(self._seconds),
            flushed_state=self._flushed / self._seen if self._seen else 0.0,
            skipped_steps=skipped_steps(self.optimizer),
            steps=self.steps,
            watched=self.watched,
        )


def _lost(shares: list[float]) -> float:
    """Return what is missing of the intended change, over the later half: moments grow in large steps at first."""
    late = shares[len(shares) // 2 :]
    return max(0.0, 1.0 - sum(late) / len(late)) if late else 0.0


def _copy(value: Any) -> Tensor | None:
    return decoded(value).detach().float().clone() if isinstance(value, Tensor) else None


def _projection(made: Tensor, meant: Tensor) -> tuple[float, float]:
    """Return (made . meant, meant . meant): their ratio is the share of the intended change that happened."""
    return float((made * meant).sum(dtype=torch.float64)), float(meant.square().sum(dtype=torch.float64))
