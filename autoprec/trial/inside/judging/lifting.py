"""A step played again with each line that rounds lifted to more bits: what do gradient and update owe to it?

The step is recorded and played (:mod:`autoprec.trial.inside.sensitivity.recorded_step`) with the script's own weights,
batch and random streams: once as it is, once with each line looked at beside itself in more bits, once with every line
lifted, then line by line. A lifted line computes from the twins of what it is given, forward and backward, and what it
gives to lines that are not lifted is rounded once. Products of 16-bit operands stay as they are. A script without
16-bit values is lifted to FP64.

Only what can matter is played. A line that gives the same when it is lifted (one operator that computes in FP32 and
rounds once, as it has to) changes no gradient. Whatever is changed, all that follows is rounded otherwise, and in a
deep model in 16 bits the gradient of one step is then another by a percent: so much changes as well when a few last
bits of its first result do. Where all lines together do not change more than that, none is lifted alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from autoprec.graph.places import caller
from autoprec.graph.trace import dtype_name
from autoprec.numerics.rounding import SIXTEEN_BIT
from autoprec.numerics.sharded import world_size
from autoprec.support.plain import Document
from autoprec.trial.inside.isolate.answering import Unanswered
from autoprec.trial.inside.judging.samples import relative_error, sampled
from autoprec.trial.inside.judging.shadow import ShadowRecorder
from autoprec.trial.inside.judging.stepping import Updates
from autoprec.trial.inside.observe.discovery import Found
from autoprec.trial.inside.observe.hooks import Events, Hooks, parameters_of
from autoprec.trial.inside.sensitivity.gradients import Gradients, local_part
from autoprec.trial.inside.sensitivity.gradients import relative_error as error_of_squares
from autoprec.trial.inside.sensitivity.recorded_step import RecordedStep, eager, random_state, set_random_state
from autoprec.trial.lifted import LiftedLines, least_change
from autoprec.trial.protocol import LiftSpec

#: One of so many elements of the first result has another last bit.
_NUDGED = 257
#: What of one rounding a line has to change of its results to be lifted alone.
_OF_A_ROUNDING = 0.1


@dataclass(frozen=True, slots=True)
class Seen:
    """What one line loses by itself.

    Attributes:
        error: the largest relative error of what one of its operators gives, against the same line in more bits.
        changes: the largest relative change of what one of them gives when the line is lifted and rounds its results.
        operator, module: of the largest error, and ``dtypes`` of its inputs.
    """

    error: float = 0.0
    changes: float = 0.0
    operator: str = ""
    module: str = ""
    dtypes: tuple[str, ...] = ()


class Lifting(ShadowRecorder):  # type: ignore[no-untyped-call]
    """Runs a step in which some lines compute in more bits.

    Args:
        model: what is trained.
        lines: those that are lifted; None for all.
        line: says which line of the script runs now, where its frame is not on the stack.
        low: dtypes that are lifted, and ``wide`` to which.
        looks: each line is looked at beside itself, and none is lifted.

    Attributes:
        seen: what each line loses that was looked at.
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
        self.seen: dict[str, Seen] = {}
        self._lifted, self._line, self._looks = lines, line, looks
        self._line_of: dict[int, str] = {}
        self._of: dict[int, str] = {}  # the line that made a twin, by its value
        self._now = ("", "", -1)
        self._at, self._view = "", False

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
        self._at = self._where_now()
        self._view = bool(getattr(func, "is_view", False))
        if self._lifted is None or self._at in self._lifted or self._view:
            return super()._run(func, args, kwargs)
        self._made, self._measure = [], None
        self._forget(self._arguments(func, args, kwargs))
        return func(*args, **kwargs)

    def _twin(self, table: dict[int, tuple[Tensor, int]], tensor: Tensor) -> Tensor | None:
        if self._looks and not self._view and self._of.get(self.value_of(tensor)) != self._at:
            return None  # another line's: this one is given what that has rounded
        return super()._twin(table, tensor)

    def _product(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: ARG002
        return None  # which experts are chosen is not looked at

    def _compare(self, func: Any, _name: str, _cls: str, args: Any, _kwargs: Any, out: Any, wide: Any, *_: Any) -> None:
        """Take the twins of what was given, and put them in its place where the line is lifted."""
        self._pair(out, wide)
        made = [(real, twin) for real, twin, table, _ in self._made if table is self._twins]
        if self._view or not self._at:
            return
        for real, twin in made:
            if self._looks:
                self._look(func, args, real, twin)
            else:
                real.copy_(twin)

    def _look(self, func: Any, args: tuple[Any, ...], real: Tensor, twin: Tensor) -> None:
        was, rounded = self.seen.get(self._at, Seen()), sampled(twin).to(real.dtype)
        lost = real.dtype is torch.float16 and bool((rounded.isfinite() & ~sampled(real).isfinite()).any())
        changes = max(was.changes, float("inf") if lost else relative_error(rounded, sampled(real)))
        error = relative_error(real, twin)
        if error > was.error:
            dtypes = tuple(dict.fromkeys(dtype_name(t.dtype) for t in args if isinstance(t, Tensor)))
            was = Seen(error, changes, func._schema.name, self._now[0], dtypes)
        self.seen[self._at] = replace(was, changes=changes)

    def _after(self, func: Any, before: tuple[Any, ...], out: Any) -> None:
        sources = {self._of.get(value) for value in before[2]} - {None} if self._view else {self._at}
        made = list(self._made)
        super()._after(func, before, out)
        for real, *_ in made:
            self._of[self.value_of(real)] = next(iter(sources), None) or self._at


class _Nudge(TorchDispatchMode):
    """Changes the last bit of a few elements of the first result of these dtypes: what does any rounding change?"""

    def __init__(self, low: tuple[torch.dtype, ...]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._low, self._done = low, False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        plain = not getattr(func, "is_view", True) and isinstance(out, Tensor) and type(out) is Tensor
        if not self._done and plain and out.dtype in self._low and out.is_contiguous() and not func._schema.is_mutable:
            part = out.detach().view(-1)[::_NUDGED]
            self._done = bool((part != 0).any())
            part.copy_(torch.nextafter(part, torch.full_like(part, float("inf"))))
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
        if not self._found.optimizers:
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
            self._done(Unanswered("a step is played again only where one process trains alone"))
            return
        kept, random = [p.grad for p in self._found.parameters], random_state(self._device)
        self._updates = Updates([] if self._found.copied else self._found.optimizers)
        try:
            answer: LiftedLines | Unanswered = self._lines()
        except Exception as error:  # of a step that cannot be played, or whose operators take no other dtype
            answer = Unanswered(f"the step could not be played again: {type(error).__name__}: {error}"[:300])
        for parameter, grad in zip(self._found.parameters, kept, strict=True):
            parameter.grad = grad
        set_random_state(random, self._device)
        self._done(answer)

    def _lines(self) -> LiftedLines:
        """Look at all lines, lift all of them, and then one by one those that give something else when lifted."""
        low: tuple[torch.dtype, ...] = SIXTEEN_BIT
        wide = torch.float32
        look = self._lifting(None, low, wide, looks=True)
        self._played(look)  # which changes nothing
        self._gradients.store({}, self._grads())
        self._updates.hold()
        rows = list(self._stepped())
        if not look.seen:
            low, wide = (torch.float32,), torch.float64
            look = self._lifting(None, low, wide, looks=True)
            self._played(look)
        noise, _ = self._change(_Nudge(low))
        every, every_update = self._change(self._lifting(None, low, wide))
        least, rounding = least_change(noise), torch.finfo(low[0]).eps * _OF_A_ROUNDING
        other = sorted((row for row in look.seen.items() if row[1].changes > rounding), key=lambda row: -row[1].error)
        played = 0
        for where, seen in other if every is None or every > least else ():
            if played >= self._spec.lines or (played and self._is_over()):
                break
            gradient, update = self._change(self._lifting(frozenset((where,)), low, wide))
            played += 1
            named = {"where": where, "operator": seen.operator, "module": seen.module, "dtypes": list(seen.dtypes)}
            rows.append(named | {"error": seen.error, "gradient": gradient, "update": update})
        rows.sort(key=lambda row: -max(row["gradient"] or 0.0, row["update"] or 0.0))
        alike = len(look.seen) - len(other)
        left = len(other) - played
        return LiftedLines(tuple(rows), every, every_update, noise, dtype_name(wide), left, alike)

    def _stepped(self) -> Iterator[Document]:
        """Yield a row of the optimizer's own step, where its weights or state are in 16 bits."""
        for optimizer in self._found.optimizers[:1]:
            states = (value for state in optimizer.state.values() for value in state.values())
            kept = [t for t in (*parameters_of(optimizer), *states) if isinstance(t, Tensor) and t.dtype in SIXTEEN_BIT]
            update = self._updates.in_more_bits(torch.float32) if kept else None
            if update is not None:
                where, dtypes = self._hooks.sources.of(optimizer), sorted({dtype_name(t.dtype) for t in kept})
                row = {"where": where, "operator": type(optimizer).__name__, "module": "", "dtypes": dtypes}
                yield row | {"error": update, "gradient": 0.0, "update": update}

    def _lifting(
        self, lines: frozenset[str] | None, low: tuple[torch.dtype, ...], wide: torch.dtype, *, looks: bool = False
    ) -> Lifting:
        return Lifting(self._found.root, lines, lambda: self._step.line, low, wide, looks=looks)

    def _change(self, mode: AbstractContextManager[Any]) -> tuple[float | None, float | None]:
        """Return the relative changes of gradient and update when the step is played in a mode; None: not finite."""
        self._played(mode)
        error = error_of_squares(*self._gradients.compare({}, self._grads()))
        return error if error == error and error != float("inf") else None, self._updates.change()

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
