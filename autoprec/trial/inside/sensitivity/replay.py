"""Gradient errors where a process must not be forked (CUDA, process groups): replay one recorded step per policy.

A probe applies its policy and plays the reference step again (:mod:`.recorded_step`). Every rank does the same, in the
same order, and a probe that fails on one of them has failed on all: they exchange gradients only once each has reported
that it has its own (:mod:`.ranks`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import torch
from torch import nn
from torch.optim import Optimizer

from autoprec.applying.compiling import is_compiled
from autoprec.numerics.sharded import rank
from autoprec.support.plain import Document
from autoprec.trial.inside.applying import apply_document
from autoprec.trial.inside.isolate.answering import Unanswered
from autoprec.trial.inside.observe.discovery import Found
from autoprec.trial.inside.observe.hooks import Events, Hooks, raw_loss
from autoprec.trial.inside.sensitivity.gradients import Gradients, local_part, relative_error
from autoprec.trial.inside.sensitivity.ranks import EndedError, Ranks, average, fill, playing_alone, replicas
from autoprec.trial.inside.sensitivity.recorded_step import RecordedStep, random_state, set_random_state
from autoprec.trial.inside.sensitivity.scan import (
    Weights,
    answered,
    finite_or_none,
    hardly_moved,
    is_over,
)
from autoprec.trial.probe_log import append_row
from autoprec.trial.protocol import GradientErrors, Probe, ProbeResult, ScanSpec

#: Relative error that a step played again under no policy may have: kernels that sum in any order make far less.
_REPEATS = 0.01


class Replay(Events):
    """Answers the probes of one :class:`ScanSpec` without forking; ``done`` receives the answer."""

    def __init__(
        self,
        spec: ScanSpec,
        found: Found,
        hooks: Hooks,
        done: Callable[[GradientErrors | Unanswered], None],
        beat: Callable[[], None] = lambda: None,
    ) -> None:
        self._beat, self._began = beat, time.monotonic()
        self._spec, self._found, self._hooks, self._done = spec, found, hooks, done
        self._device = found.parameters[0].device
        self._gradients = Gradients(found.root_parameters, shared=False)
        self._squares = self._deviation = 0.0
        # what is compiled would be compiled anew for a forward that is watched
        modules = () if is_compiled(found.root) else found.root.modules()
        self._step = RecordedStep(found.root.parameters(), self._device, modules)
        self._ranks = Ranks()
        self._scale = 0.0
        self._batch = 0
        self._unclip: dict[int, float] = {}
        self._loss = self._batch_loss = 0.0
        self._rows: list[ProbeResult] = []
        self._weights: Weights | None = None
        self._hardly_moved: list[str] = []

    def start(self) -> None:
        """Begin inside a training forward: this very call is the first of the recorded step."""
        self._step.start()
        self._hooks.events = self

    # ---------------------------------------------------------------- events of the reference steps
    def before_backward(self, tensors: tuple[torch.Tensor, ...]) -> None:
        raw = [raw_loss(t).detach() for t in tensors if t.numel() == 1]
        self._batch_loss += sum(float(local_part(t)) for t in raw)
        if self._batch == 0:
            self._step.before_backward(tensors)
            if not self._scale:
                scaled = raw and hasattr(tensors[0], "_autoprec_raw") and float(raw[0])
                self._scale = float(tensors[0].detach()) / float(raw[0]) if scaled else 1.0

    def after_backward(self, tensors: tuple[torch.Tensor, ...]) -> None:  # noqa: ARG002
        if self._batch == 0:
            self._step.after_backward()
        if self._found.backward_only:
            self._ready()

    def clipped(self, parameters: list[torch.Tensor], norm: torch.Tensor, max_norm: float) -> None:
        size = float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
        if math.isfinite(size) and size > max_norm > 0:
            self._unclip |= {id(p): (size + 1e-6) / max_norm for p in parameters}

    def gradients_ready(self, optimizer: Optimizer) -> None:
        if optimizer is not self._found.optimizers[0]:
            return
        # a fused optimizer is given scaled gradients, with what they are to be divided by and whether they overflowed
        overflowed = getattr(optimizer, "found_inf", None)
        if overflowed is not None and float(overflowed):
            self.skipped_step(optimizer)
            return
        self._hooks.unscale(self._unclip, optimizer, self._found.optimizers)
        self._ready()

    def skipped_step(self, optimizer: Optimizer) -> None:
        """Gradients overflowed under the script's GradScaler: the step that is recorded, or compared, is the next."""
        if optimizer is self._found.optimizers[0]:
            self._batch_loss, self._scale, self._unclip = 0.0, 0.0, {}
            if self._batch == 0:
                self._step.forget()

    def after_step(self, optimizer: Optimizer) -> None:
        if self._weights is not None:  # from the first complete gradients on, weights stay as they are
            self._weights.restore(optimizer)

    def _ready(self) -> None:
        if self._batch == 0:
            self._step.stop()
        self._store()
        if self._batch == 0:
            self._loss = self._batch_loss
            self._probe_all()
            self._weights = Weights(self._found)
        self._batch += 1
        self._batch_loss, self._unclip = 0.0, {}
        if self._batch >= self._spec.noise_batches or self._found.backward_only:
            self._finish()

    def _store(self) -> None:
        if self._batch:
            self._deviation += self._gradients.fold(self._batch, self._unclip, self._grads())
            return
        self._gradients.store(self._unclip, self._grads())
        squares = self._gradients.squares()
        self._squares = math.fsum(squares)
        self._hardly_moved = hardly_moved(self._found, self._over_ranks(*squares))

    def _grads(self) -> list[torch.Tensor | None]:
        return [None if p.grad is None else local_part(p.grad) for p in self._found.root_parameters]

    # ---------------------------------------------------------------- probes
    def _probe_all(self) -> None:
        scale = self._scale or 1.0
        kept = [p.grad for p in self._found.parameters]
        random = random_state(self._device)
        events, self._hooks.events = self._hooks.events, Events()
        self._check_that_it_repeats(scale)
        for probe in self._spec.probes:
            if self._rows and self._is_over():
                break
            try:
                row = self._compared(probe, self._played(probe) / scale, scale)
            except EndedError as error:
                row = ProbeResult(probe.id, failed=str(error)[:300])
            self._rows.append(row)
            append_row(self._spec.log if rank() == 0 else "", row)
            self._beat()
        apply_document(_NOTHING, self._found, self._spec.backend)
        for parameter, grad in zip(self._found.parameters, kept, strict=True):
            parameter.grad = grad
        set_random_state(random, self._device)
        self._hooks.events = events
        self._step.forget()

    def _check_that_it_repeats(self, scale: float) -> None:
        """End the scan where the step, played as the script wrote it, has other gradients than the script's.

        Its weights may have changed since (a step that is reported after the update), or be others than the model's
        (``functional_call``): every gradient error would be that difference.
        """
        try:
            found = self._compared(_AS_IT_IS, self._played(_AS_IT_IS) / scale, scale).gradient_error
        except EndedError:  # each probe says why
            return
        if found is not None and found > _REPEATS:
            why = (
                f"the script's step, played again as it is, has other gradients (relative error {found:.2g}): it "
                "changes weights before it reports the step, or trains tensors that are not the model's parameters"
            )
            self._done(Unanswered(why))

    def _played(self, probe: Probe) -> float:
        """Play the step under a probe's policy; return its loss.

        Raises:
            EndedError: that failed on one of the ranks, and then on all.
            RanksApartError: it failed on one of them where the model itself exchanges tensors.
        """
        wrappers = replicas(self._step.modules)
        with playing_alone(wrappers) if wrappers else nullcontext():
            self._ranks.together(partial(self._apply, probe))
            loss = self._ranks.together(partial(self._play_alone, wrappers))
        if any(one._comm_hooks for one in wrappers):  # what is exchanged is part of the error
            self._forget_gradients()
            return self._step.play()
        average(wrappers)
        return loss

    def _apply(self, probe: Probe) -> None:
        apply_document(probe.policy or _NOTHING, self._found, self._spec.backend)

    def _play_alone(self, wrappers: list[nn.parallel.DistributedDataParallel]) -> float:
        self._forget_gradients()
        loss = self._step.play(alone=True)
        fill(wrappers)
        return loss

    def _forget_gradients(self) -> None:
        for parameter in self._found.parameters:
            parameter.grad = None

    def _compared(self, probe: Probe, loss: float, scale: float) -> ProbeResult:
        factor = {id(p): 1.0 / scale for p in self._found.parameters} if scale != 1.0 else {}
        error2, norm2 = self._gradients.compare(factor, self._grads())
        return answered(probe, relative_error(*self._over_ranks(error2, norm2)), loss)

    def _over_ranks(self, *values: float) -> list[float]:
        """Add up over the shards of all ranks; replicated gradients are the same everywhere."""
        if not any(hasattr(p, "to_local") for p in self._found.parameters):
            return list(values)
        both = torch.tensor(values, dtype=torch.float64, device=self._device)
        torch.distributed.all_reduce(both)
        return [float(x) for x in both]

    def _is_over(self) -> bool:
        """Whether the time is used up, by the clock of the first rank: all ranks answer the same probes."""
        over = is_over(self._began, self._spec.within_s)
        if self._spec.within_s is not None and torch.distributed.is_available() and torch.distributed.is_initialized():
            decided = torch.tensor(int(over), device=self._device)
            torch.distributed.broadcast(decided, 0)
            over = bool(decided)
        return over

    def _finish(self) -> None:
        seen = self._batch
        spread = self._deviation / max(seen - 1, 1), self._squares
        self._done(
            GradientErrors(
                probes=tuple(self._rows),
                gradient_noise=finite_or_none(relative_error(*self._over_ranks(*spread))) if seen > 1 else None,
                noise_batches=seen,
                hardly_moved=tuple(self._hardly_moved),
                reference_loss=finite_or_none(self._loss),
            )
        )


_NOTHING: Document = {"schema": "autoprec.policy/1"}
_AS_IT_IS = Probe("", _NOTHING)
