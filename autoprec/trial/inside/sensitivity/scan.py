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
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.optim import Optimizer

from autoprec.applying.units import tunable_units
from autoprec.errors import AutoPrecError
from autoprec.support.plain import rebuild, shallow
from autoprec.trial.inside.applying import apply_document
from autoprec.trial.inside.isolate.answering import Unanswered, answer, await_answer, fork_to_answer
from autoprec.trial.inside.isolate.isolation import before_forks
from autoprec.trial.inside.observe.discovery import Found
from autoprec.trial.inside.observe.hooks import Events, Hooks, parameter_ids, raw_loss
from autoprec.trial.inside.sensitivity.gradients import Gradients, relative_error
from autoprec.trial.probe_log import append_row
from autoprec.trial.protocol import GradientErrors, Probe, ProbeResult, ScanSpec

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


def answered(probe: Probe, value: float, loss: float) -> ProbeResult:
    """Return what a probe found: a relative gradient error and a loss; None for what is not finite.

    Args:
        probe: what was asked.
        value: the relative gradient error.
        loss: loss of the probe's forward.
    """
    finite = math.isfinite(value) and math.isfinite(loss)
    return ProbeResult(probe.id, value if finite else None, finite_or_none(loss), nonfinite=not finite)


def finite_or_none(value: float) -> float | None:
    """Return a number as an answer has it: None where it is not finite."""
    return value if math.isfinite(value) else None


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


@dataclass(frozen=True, slots=True)
class _Seen:
    """What the reference of a scan has seen: the first batch's loss, and the squared deviations of the others."""

    batches: int = 0
    loss: float = 0.0
    deviation: float = 0.0


class Scan:
    """Answers the probes of one :class:`ScanSpec`; create it inside a training forward and call :meth:`run`."""

    def __init__(
        self,
        spec: ScanSpec,
        found: Found,
        hooks: Hooks,
        on_exit: Callable[[Callable[[], None]], None],
        beat: Callable[[], None],
    ) -> None:
        self._spec, self._found, self._hooks, self._on_exit = spec, found, hooks, on_exit
        self._gradients = Gradients(found.root_parameters)
        self._beat, self._began = beat, time.monotonic()

    def run(self) -> GradientErrors | Unanswered | None:
        """Return the answer in the process that scans, and None in a probe, which goes on into its forward."""
        before_forks()
        reference = self._fork(None)
        if reference is None:
            return None
        found = await_answer(*reference, self._limit_s)
        self._beat()
        first = None if isinstance(found, str) or "failed" in found else rebuild(_Seen, found)
        if first is None or first.batches < 1:
            why = f"no gradients: {found}" if isinstance(found, str) else found.get("failed", "no gradients")
            return Unanswered(f"the reference step of the scan failed: {why}")
        rows: list[ProbeResult] = []
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
        seen, squares = first.batches, self._gradients.squares()
        spread = first.deviation / max(seen - 1, 1)
        return GradientErrors(
            probes=tuple(rows),
            gradient_noise=finite_or_none(relative_error(spread, math.fsum(squares))) if seen > 1 else None,
            noise_batches=seen,
            hardly_moved=tuple(hardly_moved(self._found, squares)),
            reference_loss=finite_or_none(first.loss),
        )

    # ---------------------------------------------------------------- processes
    def _fork(self, probe: Probe | None) -> tuple[int, int] | None:
        pid, descriptor = fork_to_answer()
        if pid:
            return pid, descriptor
        self._run_probe(probe, descriptor)
        return None

    @property
    def _limit_s(self) -> float:
        """Sooner than the deadline of the whole scan, so that one probe that hangs does not cost the others."""
        return 0.8 * self._spec.timeout_s

    def _row(self, probe: Probe, child: tuple[int, int]) -> ProbeResult:
        found = await_answer(*child, self._limit_s)
        self._beat()
        if isinstance(found, str):
            return ProbeResult(probe.id, failed=f"no gradients: {found}")
        row = rebuild(ProbeResult, {"id": probe.id} | found)
        append_row(self._spec.log, row)
        return row

    # ---------------------------------------------------------------- in a probe
    def _run_probe(self, probe: Probe | None, writer: int) -> None:
        sys.excepthook = lambda *raised: answer(writer, {"failed": _describe(*raised)})
        self._on_exit(lambda: answer(writer, {"failed": "the script ended before the next step"}))
        if probe is None:
            self._reference(writer, _Seen())
            return
        try:
            apply_document(probe.policy, self._found, self._spec.backend)
        except AutoPrecError as error:
            answer(writer, {"failed": str(error)})
        self._hooks.events = _Watch(self._found, self._hooks, lambda watch: self._compared(writer, probe, watch))

    def _compared(self, writer: int, probe: Probe, watch: _Watch) -> None:
        found = answered(probe, relative_error(*self._gradients.compare(watch.unclip)), watch.loss)
        answer(writer, shallow(found))

    def _reference(self, writer: int, before: _Seen) -> None:
        """Keep the first batch's gradients; go on without updating, for their spread, until enough have been seen."""

        def done(watch: _Watch) -> None:
            if before.batches:
                deviation = before.deviation + self._gradients.fold(before.batches, watch.unclip)
                seen = replace(before, deviation=deviation, batches=before.batches + 1)
            else:
                self._gradients.store(watch.unclip)
                self._gradients.leave_shared()
                seen = _Seen(1, watch.loss)
            if seen.batches >= self._spec.noise_batches:
                answer(writer, shallow(seen))
            weights = Weights(self._found)

            def proceed() -> None:
                self._reference(writer, seen)

            sys.excepthook = lambda *_: answer(writer, shallow(seen))  # fewer batches than asked: still an answer
            self._on_exit(lambda: answer(writer, shallow(seen)))

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
