"""Gradient errors of many policies on the same weights and batch: one fork per policy inside a trial.

The process stops at a training forward and forks once per probe. Each fork applies its policy, lets the script run
its own forward and backward (with accumulation, scaling, whatever it does), and compares the gradients with those of
the reference, which lie in memory shared by all forks.
"""

from __future__ import annotations

import math
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from autoprec.applying.units import tunable_units
from autoprec.errors import AutoPrecError
from autoprec.trial.inside.applying import apply_document
from autoprec.trial.inside.isolate.answering import answer, await_answer, fork_to_answer
from autoprec.trial.inside.isolate.isolation import before_forks
from autoprec.trial.inside.observe.discovery import Found
from autoprec.trial.inside.observe.hooks import Events, Hooks, parameter_ids, raw_loss
from autoprec.trial.inside.sensitivity.gradients import Gradients, relative_error
from autoprec.trial.protocol import Probe, TrialSpec

#: Mini-batch gradients are compared over this many batches.
NOISE_BATCHES = 4
#: A layer whose weight has less than this share of the squared gradient that an even split over the layers would give
#: it: what it runs in cannot show yet.
_HARDLY = 1e-4


class Weights:
    """A copy of all trained weights, to undo updates with."""

    def __init__(self, found: Found) -> None:
        self._kept = [(p, p.detach().clone()) for p in found.parameters]

    def restore(self, optimizer: Optimizer | None = None) -> None:
        """Copy the weights back; only those of ``optimizer``, as others may be in use between its passes."""
        groups = optimizer.param_groups if optimizer is not None else []
        own = {id(p) for group in groups for p in group["params"]}
        with torch.no_grad():
            for parameter, value in self._kept:
                if optimizer is None or id(parameter) in own:
                    parameter.copy_(value)


def hardly_moved(found: Found, squares: Sequence[float]) -> list[str]:
    """Return the tunable layers whose weights have hardly any gradient, in model order.

    Behind a projection that begins at zero (residual branches, LoRA, adaLN-zero) the gradient of everything is zero at
    first, and tiny for some steps: whatever such a layer runs in, no error shows.

    Args:
        squares: squared norm of each gradient of ``found.root_parameters``.
    """
    sizes = {id(p): square for p, square in zip(found.root_parameters, squares, strict=True)}
    layers = {name: sizes.get(id(unit.weight)) for name, unit in tunable_units(found.root).items()}
    trained = {name: square for name, square in layers.items() if square is not None}
    total = math.fsum(squares)
    return [name for name, square in trained.items() if square * len(trained) < _HARDLY * total]


def answered(value: float, loss: float) -> dict[str, Any]:
    """Return what a probe found: a relative gradient error and a loss; None for what is not finite."""
    finite = math.isfinite(value) and math.isfinite(loss)
    shown = loss if math.isfinite(loss) else None
    return {"gradient_error": value if finite else None, "loss": shown, "nonfinite": not finite}


def unanswered(why: str) -> dict[str, Any]:
    """Return what a probe without gradients found."""
    return {"gradient_error": None, "loss": None, "nonfinite": False, "failed": why}


def is_over(began: float, within_s: float | None) -> bool:
    """Whether the time of a scan that began then (``time.monotonic()``) is used up."""
    return within_s is not None and time.monotonic() - began > within_s


class _Watch(Events):
    """Waits for the gradients of one step, remembering its loss and how it was clipped."""

    def __init__(self, found: Found, hooks: Hooks, done: Callable[[_Watch], None]) -> None:
        self._found, self._hooks, self._done = found, hooks, done
        # not the root's: during functional_call other tensors stand for its parameters, and they are trained
        self._mine = {id(p) for p in found.root_parameters}
        self._ready = False
        self.loss = 0.0
        self.unclip: dict[int, float] = {}

    def before_backward(self, tensors: tuple[torch.Tensor, ...]) -> None:
        if not self._ready:
            self.loss += sum(float(raw_loss(t).detach()) for t in tensors if t.numel() == 1)

    def after_backward(self, tensors: tuple[torch.Tensor, ...]) -> None:  # noqa: ARG002
        if self._found.backward_only:
            self._finish()

    def clipped(self, parameters: list[torch.Tensor], norm: torch.Tensor, max_norm: float) -> None:
        size = float(norm)
        if math.isfinite(size) and size > max_norm > 0:
            self.unclip |= {id(p): (size + 1e-6) / max_norm for p in parameters}

    def gradients_ready(self, optimizer: Optimizer) -> None:
        if not self._ready and not self._mine.isdisjoint(parameter_ids(optimizer)):
            self._hooks.unscale(self.unclip, optimizer, self._found.optimizers)
            self._finish()

    def skipped_step(self, optimizer: Optimizer) -> None:  # noqa: ARG002
        self._finish()

    def _finish(self) -> None:
        if not self._ready:
            self._ready = True
            self._done(self)


class Scan:
    """Answers the probes of one ``sensitivity`` trial; create it inside a training forward and call :meth:`run`."""

    def __init__(
        self,
        spec: TrialSpec,
        found: Found,
        hooks: Hooks,
        on_exit: Callable[[Callable[[], None]], None],
        beat: Callable[[], None],
    ) -> None:
        self._spec, self._found, self._hooks, self._on_exit = spec, found, hooks, on_exit
        self._gradients = Gradients(found.root_parameters)
        self._beat, self._began = beat, time.monotonic()

    def run(self) -> dict[str, Any] | None:
        """Return the payload in the process that scans, and None in a probe, which goes on into its forward."""
        before_forks()
        reference = self._fork(None)
        if reference is None:
            return None
        first = self._wait(*reference)
        if first.get("failed") or first.get("batches", 0) < 1:
            return {"failed": f"the reference step of the scan failed: {first.get('failed', 'no gradients')}"}
        rows: list[dict[str, Any]] = []
        running = deque[tuple[Probe, tuple[int, int]]]()
        for probe in self._spec.probes:
            if rows and is_over(self._began, self._spec.within_s):
                break
            if len(running) >= max(1, self._spec.side_by_side):
                rows.append(self._row(*running.popleft()))
            child = self._fork(probe)
            if child is None:
                return None
            running.append((probe, child))
        rows += [self._row(*waited) for waited in running]
        seen, squares = int(first["batches"]), self._gradients.squares()
        spread = first["deviation"] / max(seen - 1, 1)
        return {
            "probes": rows,
            "gradient_noise": relative_error(spread, math.fsum(squares)) if seen > 1 else float("nan"),
            "noise_batches": seen,
            "hardly_moved": hardly_moved(self._found, squares),
            "reference_loss": first["loss"],
        }

    # ---------------------------------------------------------------- processes
    def _fork(self, probe: Probe | None) -> tuple[int, int] | None:
        pid, descriptor = fork_to_answer()
        if pid:
            return pid, descriptor
        self._run_probe(probe, descriptor)
        return None

    def _row(self, probe: Probe, child: tuple[int, int]) -> dict[str, Any]:
        return {"id": probe.id, **self._wait(*child)}

    def _wait(self, pid: int, reader: int) -> dict[str, Any]:
        # sooner than the deadline of the whole scan, so that one probe that hangs does not cost the others
        found = await_answer(pid, reader, 0.8 * self._spec.timeout_s)
        self._beat()
        if isinstance(found, str):
            return unanswered(f"no gradients: {found}")
        return found

    # ---------------------------------------------------------------- in a probe
    def _run_probe(self, probe: Probe | None, writer: int) -> None:
        sys.excepthook = lambda *raised: answer(writer, unanswered(_describe(*raised)))
        self._on_exit(lambda: answer(writer, unanswered("the script ended before the next step")))
        if probe is None:
            self._reference(writer, {"batches": 0, "loss": 0.0, "deviation": 0.0})
            return
        try:
            apply_document(probe.policy, self._found, self._spec.backend)
        except AutoPrecError as error:
            answer(writer, unanswered(str(error)))
        self._hooks.events = _Watch(self._found, self._hooks, lambda watch: self._compared(writer, watch))

    def _compared(self, writer: int, watch: _Watch) -> None:
        answer(writer, answered(relative_error(*self._gradients.compare(watch.unclip)), watch.loss))

    def _reference(self, writer: int, seen: dict[str, Any]) -> None:
        """Keep the first batch's gradients; go on without updating, for their spread, until enough have been seen."""

        def done(watch: _Watch) -> None:
            if seen["batches"]:
                seen["deviation"] += self._gradients.fold(seen["batches"], watch.unclip)
            else:
                self._gradients.store(watch.unclip)
                self._gradients.leave_shared()
                seen["loss"] = watch.loss
            seen["batches"] += 1
            if seen["batches"] >= NOISE_BATCHES:
                answer(writer, seen)
            weights = Weights(self._found)

            def proceed() -> None:
                self._reference(writer, seen)

            sys.excepthook = lambda *_: answer(writer, seen)  # fewer batches than asked: still an answer
            self._on_exit(lambda: answer(writer, seen))

            def again(*_: Any) -> None:
                self._hooks.unwatch()
                weights.restore()
                proceed()

            if self._found.backward_only:  # the script updates after backward: undo at the next forward
                self._hooks.events = Events()
                self._hooks.watch(again)
            else:
                self._hooks.events = _Between(self._hooks, weights.restore, proceed)

        self._hooks.events = _Watch(self._found, self._hooks, done)


class _Between(Events):
    """From complete gradients to the next step: undoes every update, then hands over at the next backward."""

    def __init__(self, hooks: Hooks, undo: Callable[[Optimizer], None], proceed: Callable[[], None]) -> None:
        self._hooks, self._undo, self._proceed = hooks, undo, proceed

    def after_step(self, optimizer: Optimizer) -> None:
        self._undo(optimizer)

    def before_backward(self, tensors: tuple[torch.Tensor, ...]) -> None:
        self._proceed()
        self._hooks.events.before_backward(tensors)


def _describe(kind: type[BaseException], error: BaseException, trace: Any) -> str:
    traceback.print_exception(kind, error, trace)
    return f"{kind.__name__}: {error}"[:300]
