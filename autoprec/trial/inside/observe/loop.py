"""Count the steps of a script's own loop: losses, times, and when to stop."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.optim import Optimizer

from autoprec.applying.compiling import compiled_graphs
from autoprec.trial.inside.observe.discovery import Found
from autoprec.trial.inside.observe.hooks import Events, parameter_ids, raw_loss
from autoprec.trial.inside.observe.loose import LooseWeights
from autoprec.trial.inside.observe.measure import StepClock
from autoprec.trial.inside.observe.memory import StepPeak, lasting
from autoprec.trial.losses import loss_units

#: The learning rate of an annealed trial ends at this share of what the script set.
ANNEAL_END = 0.1
_SUM_DTYPE = {"mps": torch.float32}  # losses of one step are summed in float64 wherever there is one


def annealed(step: int, total: int) -> float:
    """The factor on the learning rate at ``step`` (from 0) of ``total``: a cosine from 1 to :data:`ANNEAL_END`."""
    if total < 2:
        return 1.0
    return ANNEAL_END + (1 - ANNEAL_END) * 0.5 * (1 + math.cos(math.pi * min(step, total - 1) / (total - 1)))


def out_of_time(steps: int, total: int, each_s: float, within_s: float) -> str:
    """Return why a trial ends that has not enough time.

    Args:
        steps, total: steps that were taken, and that were asked for.
        each_s: seconds of a step; 0 where that is not known.
        within_s: seconds that there were; 0 or less where nothing was left.
    """
    took = (
        f"a step takes {each_s:.3g} s" if each_s else f"{steps} of {total} steps {'was' if steps == 1 else 'were'} done"
    )
    if within_s < 1:
        return f"{took}, and the time budget was used up"
    return f"{took}, and {total} steps take more than the {within_s:.0f} s that were left"


def early_stop(losses: Sequence[float], reference: Sequence[float], limit: float, total: int) -> bool:
    """True when the mean absolute gap (in units of the loss) over the last quarter of the steps exceeds ``limit``.

    Args:
        losses: losses of the trial so far, one per step.
        reference: losses of the reference.
        limit: largest gap that is allowed.
        total: steps of the trial.
    """
    seen = min(len(losses), len(reference))
    if seen < max(4, total // 4):
        return False
    window = range(seen - max(seen // 4, 2), seen)
    units = loss_units(reference)
    gaps = [abs(losses[i] - reference[i]) / units[i] for i in window]
    return sum(gaps) / len(gaps) > limit


def _kept(loss: torch.Tensor) -> torch.Tensor | float:
    """Return a copy of a loss until its step is done: on a GPU a tensor, which nothing waits for; on a CPU a number.

    A tensor that is made in a step and stays lies on the heap above what the step frees. The C library then gives that
    memory back no longer, as it would in the user's own process: steps of a model with large tables were 15 % faster.
    """
    if type(loss) is torch.Tensor and loss.device.type == "cpu" and not is_functorch_wrapped_tensor(loss):
        return float(loss)
    return loss.to(_SUM_DTYPE.get(loss.device.type, torch.float64)).reshape(()).clone()


def _sum(losses: Sequence[torch.Tensor | float], device: torch.device) -> torch.Tensor | float:
    numbers = [loss for loss in losses if isinstance(loss, float)]
    if len(numbers) == len(losses):
        return sum(numbers) if numbers else math.nan
    wide = _SUM_DTYPE.get(device.type, torch.float64)
    return torch.stack([torch.as_tensor(loss, dtype=wide, device=device) for loss in losses]).sum()


class Loop(Events):
    """Watches ``total`` steps of the primary optimizer, then calls ``then(self)``; every step may also be ``seen``.

    Args:
        clock: measures the steps; paused while this class does its own work.
        then: called inside the last step's post hook, after it was counted.
        check: called after each step; may end the process (early stop, non-finite loss).
        anneal: multiply the learning rates by a cosine over ``total``.
        count_memory: count what torch's CPU allocator holds in the first two steps, into ``peak_bytes``.
        beat: called when a step is done; the driver watches for hangs by it.
        silent: called with the optimizer that steps on while the primary one has fallen silent.
        captured: called inside a CUDA graph that a whole backward goes into; no tensor can be read there.
        patience: go on for up to this many steps beyond ``total`` while a GradScaler skips steps.
    """

    def __init__(
        self,
        found: Found,
        *,
        total: int,
        clock: StepClock,
        then: Callable[[Loop], None],
        check: Callable[[Loop], None] | None = None,
        anneal: bool = False,
        count_memory: bool = False,
        beat: Callable[[], None] = lambda: None,
        silent: Callable[[Optimizer], None] = lambda _other: None,
        captured: Callable[[], None] = lambda: None,
        patience: int = 0,
    ) -> None:
        self.found, self.total, self.clock = found, total, clock
        self._then, self._check, self._anneal, self._patience = then, check, anneal, patience
        self._beat, self._silent, self._captured = beat, silent, captured
        self._foreign_steps = 0
        self._primary = None if found.backward_only else found.optimizers[0]
        self._other_steps = 0
        self._losses: list[torch.Tensor | float] = []
        self._pending: list[torch.Tensor | float] = []
        self._vectors: list[torch.Tensor | float] = []
        self._closure_call = 0
        self._rates: list[tuple[dict[str, Any], Any]] = []
        self._memory = StepPeak() if count_memory else None
        self.at_ready: Callable[[], None] | None = None  # called once, when the gradients of a step are complete
        self.at_boundary: Callable[[], None] | None = None  # called after each step, off the clock
        self.peak_bytes = 0  # of the second step; 0 where it was not counted
        self.skipped = 0
        self.backwards = 0
        self.graphs = [compiled_graphs()]  # how many there were before the first step, and after each
        self.steps = 0

    def start(self) -> None:
        """Begin the first step now (inside the first training forward)."""
        if self._memory is not None:
            self._memory.begin(lasting(self.found.root, self.found.optimizers))
        self.clock.resume()

    @property
    def losses(self) -> list[float]:
        """The objective of every step: the sum of the scalars that backward was called on."""
        return [float(x) for x in self._losses]

    @property
    def last_loss(self) -> float:
        """The objective of the last step."""
        return float(self._losses[-1])

    # ---------------------------------------------------------------- events
    def before_backward(self, tensors: tuple[torch.Tensor, ...]) -> None:
        if self._closure_call > 1:
            return
        for tensor in tensors:
            value = raw_loss(tensor).detach()
            if value.numel() != 1:
                continue
            value = value.to_local() if hasattr(value, "to_local") else value
            # gradients that a stage of the model is given are not losses: vectors count where nothing else does
            into = self._pending if tensor.numel() == 1 else self._vectors
            into.append(_kept(value))

    def captured(self) -> None:
        self._captured()

    def after_backward(self, tensors: tuple[torch.Tensor, ...]) -> None:  # noqa: ARG002
        self.backwards += 1
        if self.found.backward_only:
            self.ready()
            self._commit()

    def before_closure(self, optimizer: Optimizer, call: int) -> None:
        if self._is_primary(optimizer):
            self._closure_call = call

    def gradients_ready(self, optimizer: Optimizer) -> None:
        if self._is_primary(optimizer):
            self.ready()
        if self._anneal:
            factor = annealed(self.steps, self.total)
            for group in (one for one in optimizer.param_groups if "lr" in one):
                self._rates.append((group, group["lr"]))
                group["lr"] = group["lr"] * factor

    def ready(self) -> None:
        """Gradients of the step are complete."""
        if self.at_ready is not None:
            action, self.at_ready = self.at_ready, None
            action()

    def after_step(self, optimizer: Optimizer) -> None:
        for group, rate in self._rates:
            group["lr"] = rate
        self._rates.clear()
        if self._is_primary(optimizer):
            self._other_steps = self._foreign_steps = 0
            self._commit()
        elif self._owns_root(optimizer):
            self._other_steps += 1
            # The one we took for primary is never stepped, or another was made for the same model later.
            if self._other_steps > 2 and (self.steps == 0 or all(o is not optimizer for o in self.found.optimizers)):
                self._primary = optimizer
        elif all(o is not optimizer for o in self.found.optimizers):
            self._foreign_steps += 1
            if self._foreign_steps > 2:
                self._silent(optimizer)

    def skipped_step(self, optimizer: Optimizer) -> None:
        if self._is_primary(optimizer):
            self.skipped += 1
            self.ready()
            self._commit()

    def _is_primary(self, optimizer: Optimizer) -> bool:
        if self.found.copied:
            return False
        if self._primary is None:  # tensors that no module holds may be fitted before the model is trained
            return not isinstance(self.found.root, LooseWeights) or self._owns_root(optimizer)
        return optimizer is self._primary

    def _owns_root(self, optimizer: Optimizer) -> bool:
        return not parameter_ids(optimizer).isdisjoint(map(id, self.found.root.parameters()))

    @property
    def has_compiled(self) -> bool:
        """Whether the last step compiled anything."""
        return self.graphs[-1] > self.graphs[-2]

    @property
    def taken(self) -> str:
        """How many steps were taken, in words; beyond those asked for only while a gradient scaler skips them."""
        if self.steps < self.total or not self.skipped:
            return f"{self.steps} of {self.total} steps"
        return f"{self.steps} steps, of which the gradient scaler skipped {self.skipped}"

    # ---------------------------------------------------------------- one step done
    def _commit(self) -> None:
        self.clock.pause()
        self._losses.append(_sum(self._pending or self._vectors, self.found.parameters[0].device))
        self._pending, self._vectors, self._closure_call = [], [], 0
        self.steps += 1
        self._beat()
        self.graphs.append(compiled_graphs())
        if self._memory is not None and self.steps == 1:
            self._memory.second_step()
        if self._check is not None:
            self._check(self)
        if self._memory is not None and self.steps == 2:
            self.peak_bytes, self._memory = self._memory.end(), None
        if self.steps >= self.total + min(self.skipped, self._patience):
            self._then(self)
        if self.at_boundary is not None:
            self.at_boundary()
        self.clock.resume()


class AtGradients(Events):
    """Calls ``action`` when the gradients of the next step are complete."""

    def __init__(self, action: Callable[[], None], found: Found) -> None:
        self._action, self._found = action, found

    def after_backward(self, tensors: tuple[torch.Tensor, ...]) -> None:  # noqa: ARG002
        if self._found.backward_only:
            self._action()

    def gradients_ready(self, optimizer: torch.optim.Optimizer) -> None:  # noqa: ARG002
        if not self._found.copied:
            self._action()

    def skipped_step(self, optimizer: torch.optim.Optimizer) -> None:  # noqa: ARG002
        self._action()
