"""One step of a script that is recorded and judged, from its first forward to the forward after its first update.

Forward and backward are recorded with twins (:mod:`.shadow`), as is what the script does from its gradients to the next
forward: the optimizer's step, moving averages. Where the first update has a learning rate of 0 (a warm-up), or a
GradScaler skips it, the next one is looked at.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.optim import Optimizer
from torch.utils._python_dispatch import _disable_current_modes

from autoprec.graph.analysis.modules import ModelNames
from autoprec.graph.census import Held, Judged, Observation
from autoprec.graph.places import caller
from autoprec.graph.recorder import StepRecorder
from autoprec.graph.report import GraphReport
from autoprec.graph.saved import address_of
from autoprec.graph.trace import dtype_name
from autoprec.trial.inside.judging import forward, loop
from autoprec.trial.inside.judging.by_hand import UpdateRecorder
from autoprec.trial.inside.judging.counted import copies, hooked, read_by, reductions
from autoprec.trial.inside.judging.forward import LOW, Step
from autoprec.trial.inside.judging.held import Update, Weights, in_fp32, states_of, tensors_of
from autoprec.trial.inside.judging.lines import positions, sums
from autoprec.trial.inside.judging.lines.kept import statistics
from autoprec.trial.inside.judging.lines.recurrent import recurrent
from autoprec.trial.inside.judging.noise import NoiseRecorder, noise
from autoprec.trial.inside.judging.unseen import forget_update, forward_begins, update_ends
from autoprec.trial.inside.observe.discovery import Found
from autoprec.trial.inside.observe.hooks import Events, Hooks, raw_loss
from autoprec.trial.inside.observe.loose import LooseWeights, plain_leaves
from autoprec.trial.inside.sensitivity.recorded_step import eager

#: Seconds that a trial waits for the forward after an update.
PATIENCE_S = 20.0
#: Updates that are waited for until one has a learning rate.
_TRIES = 4
#: Backward passes after which a script without an optimizer is not waited for to update its weights.
_MICRO_BATCHES = 64
#: The end of a step that goes on.
_OPEN = 1 << 60


class Judge(Events):
    """Watches a script from inside the forward that begins its step.

    Args:
        found, hooks: of this process; the hooks' events are this object's until it is done.
        done: called once, with the report of the step and what was judged in it.
        patience_s: seconds for the forward after the update. After them ``done`` is called by a thread, and has to end
            the process: what a thread has entered no other can leave. None waits until the script ends.
    """

    def __init__(
        self, found: Found, hooks: Hooks, done: Callable[[GraphReport], None], *, patience_s: float | None = None
    ) -> None:
        self._found, self._hooks, self._done, self._patience_s = found, hooks, done, patience_s
        self._device = found.parameters[0].device.type if found.parameters else "cpu"
        self._recorder: NoiseRecorder | None = NoiseRecorder(found.root, optimizers=found.optimizers)
        self._names = self._recorder.names
        self._weights = Weights(found.optimizers, self._names)
        self._step: Step | None = None
        self._report: GraphReport | None = None
        self._update: UpdateRecorder | None = None
        self._updates: list[Update] = []
        self._losses: list[Held] = []
        self._backward_at: list[str] = []
        self._roots: list[int] = []
        self._scaled, self._scale, self._scaler = False, 1.0, ""
        self._stale = self._inside_autocast = self._bare = ""
        self._by_scaler = self._fixed = False
        self._skipped: list[float] = []
        self._rescales = 0
        self._clears = self._tries = 0
        self._unseen: list[str] = []
        self._census: list[Held] = []
        self._reduced: list[tuple[str, str]] = []
        self._stepping: list[tuple[int, int]] = []
        self._stepped: set[int] = set()
        self._first_hooks: list[Any] = []
        self._over = False
        #: no call of a module shows the forward: it ends where backward begins
        self._holder: nn.Module = found.root  # has what is updated: other tensors may stand for a model's own
        own = isinstance(found.root, LooseWeights)
        self._unseen_forward = own or (hooks.unseen is found.root and not found.optimizers)
        self._recorder.leaves_are_given = self._unseen_forward
        self._awaits = self._has_begun = False
        self._eager = contextlib.ExitStack()
        self._undo: Callable[[], None] = lambda: None
        self._lock = threading.RLock()

    def start(self, *, running: bool) -> None:
        """Begin inside a training forward; ``running``: the root's own forward has begun before."""
        if self._recorder is None:
            return
        self._recorder.__enter__()
        if running:
            self._recorder.push_root()
        self._hooks.events = self
        self._eager.enter_context(eager())  # Dynamo would trace what is measured
        clear = torch.clear_autocast_cache

        def counted() -> None:
            self._clears += 1
            clear()

        torch.clear_autocast_cache = counted
        self._undo = lambda: setattr(torch, "clear_autocast_cache", clear)

    # ---------------------------------------------------------------- events
    def before_backward(self, tensors: tuple[Tensor, ...]) -> None:
        if self._recorder is None:
            return
        where = caller(own=True)
        self._backward_at.append(where)
        for tensor in tensors:
            loss = raw_loss(tensor)
            self._roots.append(self._recorder.value_of(loss))
            self._losses.append(
                Held("loss", where, dtype_name(loss.dtype), tuple(loss.shape), in_fp32(loss.dtype), where=where)
            )
            self._scaled = self._scaled or self._multiplied(tensor)
        if self._hooks.scaler is not None and self._hooks.scaler[0].is_enabled():
            self._scaler, self._scale = self._hooks.scaler[1], float(self._hooks.scaler[0].get_scale())
            self._by_scaler = self._by_scaler or any(raw_loss(one) is not one and one.dim() == 0 for one in tensors)
            self._scaled = self._scaled or self._scale != 1.0 or self._by_scaler

    def forward_ended(self, tensors: tuple[Tensor, ...]) -> None:
        """Tell a forward that led to losses, of any shapes, from the update before it, where no module was called."""
        if not self._unseen_forward:
            return
        root, before = self._found.root, list(self._found.root.parameters())
        if isinstance(root, LooseWeights) and not self._found.optimizers:
            self._weights.follow(root.follow(plain_leaves(tensors)))
            self._found.parameters[:] = root.parameters()
            self._names = self._weights.names = ModelNames(root)
        weights = list(root.parameters())
        if self._update is not None and self._awaits:
            self._awaits = False
            self._update.end_at(forward_begins(self._update, update_ends(self._update, before, weights)))
            self._next_forward() if self._found.optimizers else self._next_by_hand()
        elif self._recorder is not None and not self._has_begun:
            self._has_begun = True
            losses = {self._recorder.value_of(raw_loss(one)) for one in tensors} - {-1}
            forget_update(self._recorder, before, weights, losses)
            self._recorder.name_parameters(self._names)

    def _multiplied(self, tensor: Tensor) -> bool:
        """Say whether a loss is the product of another with a large number: scaled by hand."""
        recorder = self._recorder
        made = (
            recorder.trace.producer(recorder.value_of(tensor)) if recorder and recorder.value_of(tensor) >= 0 else None
        )
        numbers = (
            [a for a in made.args if isinstance(a, (int, float))] if made is not None and made.name == "mul" else []
        )
        return any(abs(number) > 8 for number in numbers)

    def after_backward(self, tensors: tuple[Tensor, ...]) -> None:  # noqa: ARG002
        if not self._found.optimizers:
            self._end_step()
            self._begin_by_hand()

    def _begin_by_hand(self) -> None:
        """Look at what the script itself does with the gradients, until the next forward."""
        if self._update is not None:
            return
        self._tries += 1
        if self._hooks.functional is self._found.root and self._hooks.stand_ins:
            self._holder = LooseWeights(self._hooks.stand_ins)
            self._weights.names = ModelNames(self._holder)
        self._weights.hold(self._holder.parameters())
        self._update = UpdateRecorder(self._holder)
        self._update.__enter__()
        if self._tries == 1:
            self._lose_patience()
        self._watch_forward(self._next_by_hand)

    def _watch_forward(self, then: Callable[..., None]) -> None:
        if self._unseen_forward:
            self._awaits = True
        else:
            self._hooks.watch_next(self._found.root, then)

    def _next_by_hand(self, *_: Any) -> None:
        if isinstance(self._holder, LooseWeights) and self._holder is not self._found.root:
            self._weights.follow(self._holder.follow(self._hooks.stand_ins))
        # micro-batches follow each other without an update
        if self._update is not None and not self._update.has_updated and self._tries < _MICRO_BATCHES:
            self._close_update(keep=False)
            return
        self._finish()

    def gradients_ready(self, optimizer: Optimizer) -> None:
        if optimizer is not self._found.optimizers[0]:
            if self._update is not None:
                self._stepping.append((len(self._update.trace.calls), _OPEN))
                self._foresee(optimizer, self._update)
            return
        if self._recorder is not None and self._by_scaler and not self._hooks.is_scaler_stepping:
            self._bare = caller(own=True)
        self._end_step()
        if self._update is None:
            self._tries += 1
            self._rescales = self._hooks.rescales
            self._weights.hold()
            if torch.is_autocast_enabled(self._device) and torch.is_autocast_cache_enabled():
                self._inside_autocast = caller(own=True)
            self._clears = 0
            self._update = UpdateRecorder(self._found.root)
            self._update.__enter__()
            self._stepping, self._stepped = [(0, _OPEN)], set()
        else:
            self._stepping.append((len(self._update.trace.calls), _OPEN))
        self._foresee(optimizer, self._update)

    def _foresee(self, optimizer: Optimizer, recorder: UpdateRecorder) -> None:
        """Look at an optimizer's step on samples, and leave its operators alone where that shows all."""
        hooks = optimizer._optimizer_step_post_hooks
        if hooks:  # what a hook of the script does is no part of the step
            handle = optimizer.register_step_post_hook(self._own_step_over)
            hooks.move_to_end(handle.id, last=False)  # type: ignore[attr-defined]
            self._first_hooks.append(handle)
        recorder.paused = True
        try:
            recorder.paused = self._weights.foresee(optimizer)
        except Exception:  # it is looked at as it runs
            recorder.paused = False

    def skipped_step(self, optimizer: Optimizer) -> None:
        if optimizer is self._found.optimizers[0]:
            self._end_step()
            self._tries += 1
            if self._hooks.scaler is not None:
                self._skipped.append(float(self._hooks.scaler[0].get_scale()))
            if self._tries >= _TRIES:
                self._unseen.append(f"the GradScaler skipped {self._tries} updates in a row: none was looked at")
                self._finish()

    def _own_step_over(self, *_: Any) -> None:
        if self._update is not None:
            self._update.paused = False
            if self._stepping and self._stepping[-1][1] == _OPEN:
                self._stepping[-1] = self._stepping[-1][0], len(self._update.trace.calls)

    def after_step(self, optimizer: Optimizer) -> None:
        while self._first_hooks:
            self._first_hooks.pop().remove()
        self._own_step_over()
        if self._update is not None:
            self._stepped.add(id(optimizer))
        if optimizer is self._found.optimizers[0] and self._update is not None:
            self._lose_patience()
            self._watch_forward(self._next_forward)

    def _lose_patience(self) -> None:
        """Wait for the next forward no longer than one may."""
        if self._patience_s is not None:
            timer = threading.Timer(self._patience_s, self._finish, kwargs={"waited": True})
            timer.daemon = True
            timer.start()

    def _next_forward(self, *_: Any) -> None:
        still = torch.is_autocast_enabled(self._device) and not self._clears
        wide = any(p.dtype is torch.float32 and p.requires_grad for p in self._found.parameters)
        if self._inside_autocast and still and wide:
            self._stale = self._inside_autocast
        self._fixed = self._rescales == self._hooks.rescales and self._is_rescaled_each_step()
        rate = self._weights.rate
        if not rate and self._tries < _TRIES:
            self._close_update(keep=False)
            return
        if not rate:
            self._unseen.append("the learning rate was 0 in every update that was looked at: updates were not judged")
        self._finish()

    def _is_rescaled_each_step(self) -> bool:
        """Say whether an ``update`` has to follow this step: of several optimizers it follows the last one's."""
        scaler = self._hooks.scaler
        known = scaler is not None and type(scaler[0]).update is torch.amp.GradScaler.update
        return known and len(self._hooks.optimizers) == 1

    # ---------------------------------------------------------------- what ends
    def _end_step(self) -> None:
        """End the record of forward and backward at the gradients; what they hold is counted now."""
        recorder, self._recorder = self._recorder, None
        if recorder is None:
            return
        StepRecorder.__exit__(recorder, None, None, None)
        self._report = recorder.report()
        self._step = Step(
            recorder,
            self._report,
            tuple(self._backward_at),
            self._scaled,
            self._scale,
            tuple(self._hooks.sources.casts),
            tuple(self._roots),
            frozenset(address_of(t) for p in self._found.parameters for t in (p, p.grad) if t is not None),
        )
        self._census = [*tensors_of(self._found.root, self._names, self._hooks.sources.loaded), *self._losses[:8]]
        self._census += read_by(self._step)
        self._reduced = [*reductions(self._step), *hooked(self._found.root)]
        self._census += [
            Held("reduced gradient", where, dtype, twin="fp32" if dtype in LOW else "")
            for where, dtype in self._reduced
        ]
        if self._scaler:
            self._census.append(Held("loss scale", f"{self._scale:g}", "fp32", where=self._scaler))

    def _close_update(self, *, keep: bool, waited: bool = False) -> None:
        update, self._update = self._update, None
        if update is None:
            return
        by_hand = not self._found.optimizers
        if keep and (self._weights.rate or by_hand):
            with _disable_current_modes():  # what is compared is not the script's
                stepped = [at for at, one in enumerate(self._found.optimizers) if id(one) in self._stepped]
                self._updates = [one for one in self._weights.updates(update) if by_hand or one.optimizer in stepped]
                if by_hand:
                    self._by_hand = update.line_of([p for p in self._holder.parameters() if p.dtype in update.low])
                self._assigned = tuple(v for v in map(update.value_of, self._holder.parameters()) if v >= 0)
        if not waited:
            StepRecorder.__exit__(update, None, None, None)
        if keep:
            self._kept_update = update

    _kept_update: UpdateRecorder | None = None
    _by_hand = ""
    _assigned: tuple[int, ...] = ()

    def _finish(self, *, waited: bool = False) -> None:
        """Judge what was seen, once; a failure of that is said, and never ends the script's own step."""
        with self._lock:
            if self._over:
                return
            self._over = True
            self._hooks.events = Events()
            if not waited:
                self._undo()
                self._eager.close()
            try:
                self._end_step()
                self._close_update(keep=True, waited=waited)
                judged = self._judged()
            except Exception as error:
                judged = Judged(unseen=(f"the step was not judged: {type(error).__name__}: {error}",))
            report = self._report
        if report is not None:
            self._done(replace(report, judged=judged))

    def end(self) -> bool:
        """End early, as the script ends; say whether a step was recorded by then."""
        if self._recorder is not None and not self._recorder.trace.backwards:
            return False
        self._finish()
        return True

    def failed(self, error: BaseException) -> bool:
        """Judge a step that ended with an error, where that is a fault of precision; say whether it is."""
        seen = broken_backward(error)
        if seen is None or self._over:
            return False
        self._broken = seen
        self._finish()
        return True

    _broken: Observation | None = None

    def _judged(self) -> Judged:
        step = self._step
        if step is None:
            return Judged(unseen=("no step was seen",))
        optimizers = [(one, self._hooks.sources.of(one)) for one in self._found.optimizers]
        weights = {address_of(p) for p in self._found.root.parameters()}
        if self._kept_update is not None:
            weights |= self._kept_update.weights
        around = loop.Loop(
            optimizers,
            step.casts,
            self._kept_update,
            self._updates,
            frozenset(weights.union(map(address_of, [*self._states(), *self._found.parameters]))),
            frozenset(weights),
            self._scaler,
            self._stale,
            self._bare,
            tuple(self._stepping),
            tuple(pair for pair in self._reduced if pair[1] in LOW),
            tuple(self._skipped),
            self._fixed,
            self._by_hand,
            self._assigned,
        )
        census = [*self._census, *states_of(self._found.optimizers, self._names)]
        if self._kept_update is not None:
            grads = [p.grad for p in self._found.parameters if p.grad is not None]
            census += copies(self._kept_update, [*self._found.root.parameters()], [*grads, *self._states()])
        observations = [
            *positions.positions(step),
            *forward.seen(step),
            *sums.gathered(step),
            *noise(step),
            *recurrent(step),
            *statistics(step),
        ]
        averages = {one.where for one in observations if one.code in ("ema-16bit", "statistics-16bit")}
        observations = [one for one in observations if one.code != "reduction-16bit" or one.where not in averages]
        observations += [*loop.seen(around, step, census), *positions.tables(step, self._names)]
        if self._broken is not None:
            observations.insert(0, self._broken)
        looked_at = {
            "operators": len(step.calls),
            "operators beside FP32": len(step.measures),
            "tensors": len(census),
            "updates": sum(one.elements for one in self._updates),
        }
        if step.recorder.failures:
            self._unseen.append(f"{step.recorder.failures} operators have no FP32 form to be held against")
        return Judged(tuple(census), tuple(observations), looked_at, tuple(self._unseen))

    def _states(self) -> list[Tensor]:
        """Return the tensors of the optimizers' state, of any shape."""
        states = [state for one in self._found.optimizers for state in one.state.values()]
        return [value for state in states for value in state.values() if isinstance(value, Tensor)]


def broken_backward(error: BaseException) -> Observation | None:
    """Return what is known of a backward of an own ``autograd.Function`` that met two dtypes; None for other errors."""
    trace, found = error.__traceback__, None
    if "dtype" not in str(error) and "same type" not in str(error):
        return None
    while trace is not None:
        frame = trace.tb_frame
        context = next((v for v in frame.f_locals.values() if isinstance(v, BackwardCFunction)), None)
        if context is not None and frame.f_code.co_name == "backward":
            found = frame.f_code.co_filename, trace.tb_lineno, type(context).__name__.removesuffix("Backward")
        trace = trace.tb_next
    if found is None:
        return None
    file, line, name = found
    said = str(error).splitlines()[0][:200]
    return Observation("function-backward", f"{file}:{line}", name, "", (), {"what": name, "error": said})
