"""A step played again with each line that rounds lifted to more bits: what does the gradient owe to it?

The step is recorded and played (:mod:`autoprec.trial.inside.sensitivity.recorded_step`) with the script's own weights,
batch and random streams: once as it is, once with every line lifted, then line by line, those of the largest errors
first. A lifted line computes from the twins of what it is given, forward and backward, and what it gives to lines that
are not lifted is rounded once. Products of 16-bit operands stay as they are. A script without 16-bit values is lifted
to FP64.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from autoprec.graph.places import caller
from autoprec.graph.trace import dtype_name
from autoprec.numerics.rounding import SIXTEEN_BIT
from autoprec.numerics.sharded import world_size
from autoprec.trial.inside.isolate.answering import Unanswered
from autoprec.trial.inside.judging.shadow import ShadowRecorder
from autoprec.trial.inside.observe.discovery import Found
from autoprec.trial.inside.observe.hooks import Events, Hooks
from autoprec.trial.inside.sensitivity.gradients import Gradients, local_part, relative_error
from autoprec.trial.inside.sensitivity.recorded_step import RecordedStep, eager, random_state, set_random_state
from autoprec.trial.protocol import LiftedLines, LiftSpec


class Lifting(ShadowRecorder):  # type: ignore[no-untyped-call]
    """Runs a step in which some lines compute in more bits.

    Args:
        model: what is trained.
        lines: those that are lifted; None for all.
        line: says which line of the script runs now, where its frame is not on the stack.
        low: dtypes that are lifted, and ``wide`` to which.
        looks: all lines are looked at beside their twins, and none is lifted.

    Attributes:
        seen: of each line that was lifted, or looked at: the largest relative error of its outputs, the operator that
            has it, its module, and the dtypes of its inputs.
    """

    def __init__(
        self,
        model: nn.Module,
        lines: frozenset[str] | None,
        line: Callable[[], str],
        low: tuple[torch.dtype, ...] = SIXTEEN_BIT,
        wide: torch.dtype = torch.float32,
        *,
        looks: bool = False,
    ) -> None:
        super().__init__(model)
        self.low, self.wide = low, wide
        self.seen: dict[str, tuple[float, str, str, tuple[str, ...]]] = {}
        self._lifted, self._line, self._looks = lines, line, looks
        self._line_of: dict[int, str] = {}
        self._now = ("", "", -1)

    def _before(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        before = super()._before(func, args, kwargs)
        self._now = before[3], before[4], before[5]
        return before

    def _where_now(self) -> str:
        """Return the line that runs; in a backward pass, that of the forward operator."""
        _, phase, seq = self._now
        if phase == "backward":
            return self._line_of.get(seq, "")
        where = self._line() or caller()
        self._line_of[seq] = where
        return where

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        where = self._where_now()
        out = super()._run(func, args, kwargs)
        if self._measure is None:
            return out
        view = getattr(func, "is_view", False)
        made = [(real, twin) for real, twin, table, _ in self._made if table is self._twins]
        if self._lifted is not None and where not in self._lifted:
            if not view:
                self._made = []
                self._forget(self._arguments(func, args, kwargs))
            return out
        if not view and not self._looks:
            with torch.no_grad():
                for real, twin in made:
                    real.copy_(twin)
        if where and self._measure.error > self.seen.get(where, (0.0,))[0]:
            dtypes = tuple(dict.fromkeys(dtype_name(t.dtype) for t in args if isinstance(t, Tensor)))
            self.seen[where] = (self._measure.error, func._schema.name, self._now[0], dtypes)
        return out


class Lift(Events):
    """Answers one :class:`LiftSpec`; ``done`` receives the answer.

    Args:
        spec: how many lines, and for how long.
        found, hooks: of this process.
        done: called once.
        beat: called after each time that the step was played.
    """

    def __init__(
        self,
        spec: LiftSpec,
        found: Found,
        hooks: Hooks,
        done: Callable[[LiftedLines | Unanswered], None],
        beat: Callable[[], None] = lambda: None,
    ) -> None:
        self._spec, self._found, self._hooks, self._done, self._beat = spec, found, hooks, done, beat
        self._began = time.monotonic()
        self._device = found.parameters[0].device
        self._gradients = Gradients(found.root_parameters, shared=False)
        self._step = RecordedStep(found.root.parameters(), self._device, found.root.modules())

    def start(self) -> None:
        """Begin inside a training forward: this very call is the first of the recorded step."""
        self._step.start()
        self._hooks.events = self

    def before_backward(self, tensors: tuple[Tensor, ...]) -> None:
        self._step.before_backward(tensors)

    def after_backward(self, tensors: tuple[Tensor, ...]) -> None:  # noqa: ARG002
        self._step.after_backward()
        if self._found.backward_only:
            self._answer()

    def gradients_ready(self, optimizer: Optimizer) -> None:
        if optimizer is self._found.optimizers[0]:
            self._answer()

    def skipped_step(self, optimizer: Optimizer) -> None:
        if optimizer is self._found.optimizers[0]:
            self._answer()

    def _answer(self) -> None:
        self._step.stop()
        self._hooks.events = Events()
        if world_size() > 1:
            self._done(Unanswered("ranks train together: lines are not lifted there"))
            return
        kept, random = [p.grad for p in self._found.parameters], random_state(self._device)
        try:
            answer: LiftedLines | Unanswered = self._lines()
        except Exception as error:  # of a step that cannot be played, or whose operators take no other dtype
            answer = Unanswered(f"the step could not be played again: {type(error).__name__}: {error}"[:300])
        for parameter, grad in zip(self._found.parameters, kept, strict=True):
            parameter.grad = grad
        set_random_state(random, self._device)
        self._done(answer)

    def _lines(self) -> LiftedLines:
        self._played(nullcontext())
        self._gradients.store({}, self._grads())
        noise = self._change(nullcontext())
        low: tuple[torch.dtype, ...] = SIXTEEN_BIT
        wide = torch.float32
        whole = self._lifting(None, low, wide, looks=True)
        self._played(whole)
        if not whole.seen:
            low, wide = (torch.float32,), torch.float64
            whole = self._lifting(None, low, wide, looks=True)
            self._played(whole)
        every = self._change(self._lifting(None, low, wide))
        rows: list[dict[str, Any]] = []
        ranked = sorted(whole.seen.items(), key=lambda row: -row[1][0])
        for where, (error, operator, module, dtypes) in ranked[: self._spec.lines]:
            if rows and self._is_over():
                break
            change = self._change(self._lifting(frozenset((where,)), low, wide))
            named = {"where": where, "operator": operator, "module": module, "dtypes": list(dtypes)}
            rows.append(named | {"error": error, "gradient": change})
        rows.sort(key=lambda row: -float(row["gradient"] or 0.0))
        left = len(ranked) - len(rows)
        return LiftedLines(tuple(rows), every, noise, dtype_name(wide), left)

    def _lifting(
        self, lines: frozenset[str] | None, low: tuple[torch.dtype, ...], wide: torch.dtype, *, looks: bool = False
    ) -> Lifting:
        return Lifting(self._found.root, lines, lambda: self._step.line, low, wide, looks=looks)

    def _change(self, mode: AbstractContextManager[Any]) -> float | None:
        """Return the relative change of the gradient when the step is played in a mode; None where it is not finite."""
        self._played(mode)
        error = relative_error(*self._gradients.compare({}, self._grads()))
        return error if error == error and error != float("inf") else None

    def _played(self, mode: AbstractContextManager[Any]) -> None:
        for parameter in self._found.parameters:
            parameter.grad = None
        with eager(), mode:
            self._step.play(alone=True)
        self._beat()

    def _grads(self) -> list[Tensor | None]:
        return [None if p.grad is None else local_part(p.grad) for p in self._found.root_parameters]

    def _is_over(self) -> bool:
        within = self._spec.within_s
        return within is not None and time.monotonic() - self._began > within
