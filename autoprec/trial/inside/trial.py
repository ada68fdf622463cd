"""One trial, inside the training process: apply the policy, watch the steps, write the result, end the process."""

from __future__ import annotations

import contextlib
import math
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn

from autoprec.applying.compiling import (
    cache_graphs,
    compiled_blocks,
    is_compiled,
    keep_random_streams,
    run_eagerly,
)
from autoprec.errors import AutoPrecError
from autoprec.graph.places import raised_at
from autoprec.graph.report import GraphReport
from autoprec.numerics.sharded import any_rank, rank, world_size
from autoprec.support.plain import Document
from autoprec.trial.inside.applying import StateSeen, apply_document, by_block, state_seen, watch_state
from autoprec.trial.inside.checking.gemm_check import GemmCheck
from autoprec.trial.inside.forking import take_threads
from autoprec.trial.inside.isolate import savers
from autoprec.trial.inside.isolate.answering import Unanswered
from autoprec.trial.inside.isolate.seeding import reseed
from autoprec.trial.inside.observe.conditions import (
    Conditions,
    foreign_memory,
    read_conditions,
    still_compiling,
    unreliable,
)
from autoprec.trial.inside.observe.discovery import Found, batch_size, is_running
from autoprec.trial.inside.observe.hooks import Events, Hooks
from autoprec.trial.inside.observe.loop import AtGradients, Loop, early_stop, out_of_time
from autoprec.trial.inside.observe.measure import clock_for, heap_for
from autoprec.trial.inside.observe.memory import is_out_of_memory
from autoprec.trial.inside.observe.operator_times import OperatorTimer
from autoprec.trial.inside.observe.turns import Turn
from autoprec.trial.inside.perturbing import perturb_run
from autoprec.trial.inside.reporting.ending import note_warnings, status_of, wait_and_exit, write_result
from autoprec.trial.inside.reporting.mismatch import measure_mismatch
from autoprec.trial.inside.reporting.reports import Reports
from autoprec.trial.inside.sensitivity.staying import serve_scans
from autoprec.trial.losses import HIGHER, Series
from autoprec.trial.progress import Beat, steps_file
from autoprec.trial.protocol import (
    OUT_OF_TIME,
    SMALL_MODEL,
    TRY_S,
    Answer,
    DuelSpec,
    LiftSpec,
    NumericsSpec,
    RecordSpec,
    ScanSpec,
    TimesSpec,
    TrainSpec,
    TrialResult,
    TrialSpec,
    TrySpec,
)

#: Why a script whose step is a CUDA graph is not tried.
CAPTURED = (
    "the script captures its forward and backward pass in a CUDA graph, whose replays run without Python: no step can "
    "be seen or timed (torch.compile with mode='reduce-overhead' is fine)"
)


class Trial:
    """One trial in this process. :meth:`begin` is called inside the first training forward and returns into it."""

    def __init__(
        self,
        spec: TrialSpec,
        found: Found,
        hooks: Hooks,
        *,
        result: Path,
        asked: float,
        writer: bool = True,
        may_fork: bool = True,
        stays: str = "",
        turns: Path | None = None,
        reports: Reports | None = None,
    ) -> None:
        self._turn = Turn(turns) if turns is not None and isinstance(spec, TrainSpec) and spec.turns else None
        self._may_fork, self._stays, self._is_again = may_fork, stays, False
        self.spec, self.found, self.hooks = spec, found, hooks
        self._path, self._asked, self._writer = result, asked, writer
        self._reports = reports or Reports()
        self._start = self._begun = self._first_step = time.monotonic()
        self._policy: Any = None
        self._batch, self._device = 0, next(iter(found.parameters)).device
        self._recorder: Any = None
        self._looks: GemmCheck | OperatorTimer | None = None
        self._answer: Answer | None = None
        self._blocks, self._needed_s, self._passed_over, self._peak_bytes = 0, 0.0, "", 0
        self._judged: Any = None
        self._warned: dict[str, None] = {}
        self._monitors: list[Any] = []
        self._before: Conditions | None = None
        self._ending = threading.RLock()
        self.loop: Loop | None = None
        self._beat: Callable[[], None] = Beat(steps_file(result)) if writer else lambda: None
        self.pid = os.getpid()  # only this process tells how the script ended, not what it forks
        self.at_exit: Callable[[], None] = self._too_short

    # ---------------------------------------------------------------- start
    def begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Prepare the models as asked and start watching; a policy that cannot be applied ends the process here.

        Args:
            module: the model whose forward begins the first training step.
            args, kwargs: the arguments of that call.
        """
        spec = self.spec
        sys.excepthook = self._on_exception
        note_warnings(self._warned)
        if isinstance(spec, DuelSpec):
            self._duel(spec)
            return
        take_threads()
        train = spec if isinstance(spec, TrainSpec) else None
        if self._turn is not None:
            self._turn.beside_others()
        if isinstance(spec, (ScanSpec, NumericsSpec, LiftSpec)):
            run_eagerly()  # each probe has other layers, and compiling them would take longer than the probe
        if spec.seed is not None:
            reseed(spec.seed + rank())
        if train is not None and train.perturb:  # before the policy, which may store weights in another format
            perturb_run(self.found, train.perturb)
        blocks = train is not None and train.by_block
        document = by_block(spec.policy, self.found.root) if blocks else spec.policy
        own = document is not None and is_compiled(self.found.root)
        try:
            # in a trial shares of a run are shares of the trial
            self._policy = apply_document(document, self.found, spec.backend, run_steps=max(1, spec.total))
        except AutoPrecError as error:
            self.finish(status_of(error), str(error))
        if blocks:
            self._blocks = compiled_blocks(self.found.root)
        if isinstance(spec, NumericsSpec):
            self._looks = GemmCheck(self.found.root)
        if isinstance(spec, TimesSpec):
            self._looks = OperatorTimer(self._device, spec.warmup, spec.steps)
        execution = "keep" if self._policy is None else self._policy.execution
        compiles = execution in ("compile", "compile_whole")
        if compiles and not own:  # the reference then runs as eager code
            keep_random_streams()
        if compiles or is_compiled(self.found.root):
            cache_graphs()  # of all kinds of trials alike: what differs in it is not found in the cache
        self._heap = heap_for(self._device, self.pid, timed=isinstance(spec, (TrainSpec, TimesSpec)))
        self._monitors = watch_state(self._policy, self.found, max(1, spec.total))
        self._batch = batch_size(args, kwargs)
        self.loop = Loop(
            self.found,
            total=spec.total,
            clock=clock_for(self._device),
            then=self._enough,
            check=self._check_of(spec),
            anneal=train is not None and train.anneal,
            patience=30 if isinstance(spec, ScanSpec) else 0,
            beat=self._beat,
            silent=self._moved_on,
            captured=self._captured,
            # where there is a step for it that is not timed
            count_memory=self._device.type == "cpu" and train is not None and train.warmup >= 2,
        )
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        if train is not None:  # nothing else is timed, and a scan on a busy GPU needs no repetition
            self._before = read_conditions(self._device)
            if train.metric:
                loop, asked = self.loop, Series(train.metric, train.better == HIGHER)
                end = partial(self.finish, "ok") if self._writer else lambda: None  # the first rank ends the trial
                self._reports.ask(asked, train.total, lambda: loop.steps, end)
                measure_mismatch(train.metric, self.found, self.hooks, loop, self._reports)
        self.hooks.events = self.loop
        self._begun = time.monotonic()
        if spec.total:
            if train is not None and train.record_graph and spec.total == 1:
                self._record(module)
            self.loop.start()
        else:
            self._at_forward(module)

    def _check_of(self, spec: TrialSpec) -> Callable[[Loop], None] | None:
        """Return what looks at every step of a kind of trial; None for nothing."""
        if isinstance(spec, TrainSpec):
            return partial(self._check, spec)
        if isinstance(self._looks, OperatorTimer):
            return self._looks.check
        return self._tried if isinstance(spec, TrySpec) else None

    def _duel(self, spec: DuelSpec) -> None:
        from autoprec.trial.inside.duel import Duel
        from autoprec.trial.inside.forked_duel import ForkedDuel

        self._begun = time.monotonic()
        if self._may_fork and spec.side_by_side > 1:
            forked = ForkedDuel(spec, self.found, self.hooks, self.on_exit, self._beat)
            answer = forked.run()
            if answer is not None:  # None in a contender, which goes on into the forward
                self._answered(answer)
            self.loop = forked.loop
            return
        take_threads()
        duel = Duel(spec, self.found, self._answered, self._beat)
        self.loop = self.hooks.events = duel.loop
        self.on_exit(duel.end)
        duel.begin()

    def credit(self, seconds: float) -> None:
        """Take time off the running step that other processes would have spent."""
        if self.loop is not None:
            self.loop.clock.credit(seconds)

    # ---------------------------------------------------------------- steps
    def _check(self, spec: TrainSpec, loop: Loop) -> None:
        if self._before is not None and loop.steps == spec.warmup:
            # by now NCCL, cuBLAS and the compiler hold what they need: memory of this process, not of another
            self._before = replace(self._before, foreign_memory=foreign_memory(self._device))
        if self._turn is not None and loop.steps == spec.warmup:
            self._turn.alone()
        self._look_at_the_time(spec, loop)
        # On a GPU reading a loss waits for the device, and would slow down every step that is timed; so do ranks that
        # ask each other.
        if (self._device.type == "cpu" and world_size() == 1) or loop.steps % 8 == 0 or loop.steps == loop.total:
            losses = loop.losses
            if any_rank(not math.isfinite(losses[-1]), self._device):  # each rank has a loss of its own
                self.finish("diverged", f"the loss is {losses[-1]} at step {loop.steps}")
            gap = spec.stop_gap if loop.steps < loop.total else None
            if gap is not None and early_stop(losses, spec.reference_losses, gap, loop.total):
                self.finish("pruned", f"the loss is more than {gap:.2%} off the reference at step {loop.steps}")
        if spec.record_graph and loop.steps == loop.total - 1:
            self.hooks.watch_next(self.found.root, lambda module, *_: self._record(module))

    def _look_at_the_time(self, spec: TrainSpec, loop: Loop) -> None:
        """End a trial that has no more time, or, once two steps are known, one that will not have enough."""
        within, now = spec.within_s, time.monotonic()
        if within is None or loop.steps == loop.total:
            return
        if loop.steps == 1:
            self._first_step = now  # it may compile
        # the second step of a function compiles, too, whose first ran as eager code to find the model
        each_s = now - self._first_step if loop.steps == 2 and not loop.has_compiled else 0.0
        needed_s = now - self._asked + (loop.total - loop.steps) * each_s
        if world_size() > 1 and loop.steps > 2 and loop.steps % 8:
            return
        if any_rank(needed_s > within, self._device):
            self._needed_s = needed_s
            self.finish(OUT_OF_TIME, out_of_time(loop.steps, loop.total, each_s, within))

    def _tried(self, loop: Loop) -> None:
        """After the first step of a ``try``: go on for a second, in case the script is soon done with this model."""
        now = time.monotonic()
        if loop.steps == 1:
            self._first_step = now
            patience = 60.0 if self._is_small() else TRY_S
            timer = threading.Timer(patience, self.finish, ("ok",))  # it may take no further step for minutes
            timer.daemon = True
            timer.start()
        elif now - self._first_step > TRY_S:
            self.finish("ok")

    def _is_small(self) -> bool:
        return sum(p.numel() for p in self.found.root.parameters()) <= SMALL_MODEL

    def _moved_on(self, other: torch.optim.Optimizer) -> None:
        """The script switched models; the driver must probe the new one."""
        loop, name = self.loop, type(self.found.root).__name__
        steps = loop.steps if loop is not None else 0
        if isinstance(self.spec, TrySpec) and not self._is_small():
            self.finish("ok")
        by = type(other).__name__
        why = f"{name} was trained for {steps} steps only, then the script went on with another model (by {by})"
        self._passed_over = why
        self.finish("too_short", why)

    def _captured(self) -> NoReturn:
        """The script captures its step in a CUDA graph: what is replayed calls nothing that could be counted."""
        self.loop = None  # no tensor can be read in here
        self.finish("unsupported", CAPTURED)

    def _enough(self, loop: Loop) -> None:
        if isinstance(self.spec, TrainSpec):
            self._peak_bytes = self._peak_bytes or self._peak(loop)  # what comes after the steps is not of them
            if self._reports.gives_up(loop.steps):
                self._end_unreported()
            if loop.steps == loop.total and not self._writer:
                self._write("ok", "")
                threading.Thread(target=wait_and_exit, args=(self._path,), daemon=True).start()
        elif isinstance(self.spec, TrySpec):
            self.finish("ok")
        else:
            if self._looks is not None:
                self._answered(self._looks.end())
            self.hooks.events = Events()
            self.hooks.watch_next(self.found.root, self._at_forward)

    def _end_unreported(self) -> NoReturn:
        """End a trial whose steps are done, by what was reported so far of the metric that it was asked for."""
        missing = self._reports.missing if self._writer else ""
        self.finish("unreported" if missing else "ok", missing)

    def _peak(self, loop: Loop) -> int:
        allocated = torch.cuda.max_memory_allocated(self._device) if self._device.type == "cuda" else 0
        return max(allocated, loop.peak_bytes)

    def _at_forward(self, module: nn.Module, *_: Any) -> None:
        """The step that answers the question of a :class:`RecordSpec` or a :class:`ScanSpec` starts here."""
        spec = self.spec
        if isinstance(spec, LiftSpec):
            from autoprec.trial.inside.judging.lifting import Lift

            Lift(spec, self.found, self.hooks, self._answered, self._beat).start()
            return
        if not isinstance(spec, ScanSpec):
            from autoprec.graph.fake import is_fake

            if is_fake(self.found.root):
                self._record(module)
                self.hooks.events = AtGradients(self._end_record, self.found)
            else:
                self._judge(module)
            return
        if not self._may_fork:
            from autoprec.trial.inside.sensitivity.replay import Replay

            Replay(spec, self.found, self.hooks, self._answered, self._beat).start()
            return
        from autoprec.trial.inside.sensitivity.scan import Scan

        if self._stays:
            self._begin_again(serve_scans(self._stays))
            spec = self.spec
            assert isinstance(spec, ScanSpec)  # the driver forks this process for nothing else
        scan = Scan(spec, self.found, self.hooks, self.on_exit, self._beat)
        answer = scan.run()  # returns None in a probe, which goes on into the forward
        if answer is not None:
            self._answered(answer)

    def _begin_again(self, config: Document) -> None:
        """Be the scan of a configuration, in a fork of a process that stays at its step."""
        asked, self._path, self.pid = float(config["asked"]), Path(config["result"]), os.getpid()
        self.spec, self._is_again = TrialSpec.from_json(config["spec"]), asked != self._asked
        if self._is_again:
            self._asked, self._begun = asked, time.monotonic()
            self._beat = Beat(steps_file(self._path)) if self._writer else self._beat

    def _answered(self, answer: Answer | Unanswered) -> NoReturn:
        if isinstance(answer, Unanswered):
            self.finish("crashed", answer.why)
        self._answer = answer
        self.finish("ok")

    # ---------------------------------------------------------------- operator graph
    def _judge(self, module: nn.Module) -> None:
        """Record this step, and judge the script's own precision by it and by the update that follows."""
        from autoprec.trial.inside.judging.judge import PATIENCE_S, Judge

        def done(report: GraphReport) -> None:
            self._answer = report
            self.finish("ok")

        judge = self._judged = Judge(self.found, self.hooks, done, patience_s=PATIENCE_S)
        judge.start(running=self._runs_inside(module))
        ended = self.at_exit
        self.on_exit(lambda: None if judge.end() else ended())

    def _runs_inside(self, module: nn.Module) -> bool:
        """Say whether a module that is called is a part of the model, whose own forward is on the stack."""
        return not any(child is self.found.root for child in module.modules()) and is_running(self.found.root)

    def _record(self, module: nn.Module) -> None:
        from autoprec.graph.fake import recorder_for

        self._recorder = recorder_for(self.found.root, self.found.optimizers)
        self._recorder.__enter__()
        if self.loop is not None:
            self.loop.at_ready = self._end_record
        if self._runs_inside(module):
            self._recorder.push_root()  # this is one of its children

    def _end_record(self) -> None:
        self._recorder.__exit__(None, None, None)
        self._answer = self._recorder.report()
        self._recorder = None  # of a large step half the memory is the record
        if isinstance(self.spec, RecordSpec):
            self.finish("ok")

    # ---------------------------------------------------------------- end
    def _on_exception(self, kind: type[BaseException], error: BaseException, trace: Any) -> None:
        traceback.print_exception(kind, error, trace)
        if self._judged is not None:
            self._judged.failed(error)
        if issubclass(kind, KeyboardInterrupt):
            self.finish("crashed", "interrupted")
        where = f" ({at})" if (at := raised_at(trace)) else ""
        reason = f"{kind.__name__}: {str(error).splitlines()[0] if str(error) else ''}{where}"
        if savers.suppressed:
            reason += f"; AutoPrec left out {savers.remarks()}, which may be the cause"
        status = "oom" if is_out_of_memory(error) else status_of(error)
        self.finish(status, reason[:500])

    def on_exit(self, action: Callable[[], None]) -> None:
        """Replace what happens when the script ends by itself."""
        self.at_exit, self.pid = action, os.getpid()

    def _too_short(self) -> None:
        if isinstance(self.spec, TrainSpec) and self.loop is not None and self.loop.steps >= self.loop.total:
            self._end_unreported()
        reason = f"the script ended after {self.loop.taken if self.loop else '0 of 0 steps'}"
        if not self.hooks.backwards:
            reason += "; no backward() was ever called"
        if savers.suppressed:
            reason += f"; AutoPrec left out {savers.remarks()}"
        self.finish("too_short", reason)

    def finish(self, status: str, reason: str = "") -> NoReturn:
        """Write the result and end this process at once: no exit handler of the script runs."""
        with self._ending:  # of two threads the second waits until the process has ended
            self._end(status, reason)

    def _end(self, status: str, reason: str) -> NoReturn:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        self._write(status, reason)
        os._exit(0)

    def _write(self, status: str, reason: str) -> None:
        if self._writer:
            write_result(self._path, self._result(status, reason))
        elif isinstance(self.spec, TrainSpec):
            with contextlib.suppress(Exception):  # the first rank's result counts
                write_result(self._path.with_name(f"{self._path.name}.rank{rank()}"), self._result(status, reason))

    def _result(self, status: str, reason: str) -> TrialResult:
        now, spec = time.monotonic(), self.spec
        warmup = spec.warmup if isinstance(spec, (TrainSpec, ScanSpec)) and not self._is_again else 0
        result = TrialResult(
            status=status,
            reason=reason,
            warmup=warmup,
            start_s=self._begun - self._asked,
            wall_s=now - self._asked,
            training_s=now - self._begun,
            blocks=self._blocks,
            needed_s=self._needed_s,
            passed_over=self._passed_over,
            answer=self._answer,
        )
        loop = self.loop
        if loop is None or not loop.steps:
            return result
        done = min(loop.steps, loop.total) if isinstance(spec, TrainSpec) else loop.steps
        doubt = unreliable(self._before, read_conditions(self._device) if self._before is not None else None)
        result = replace(
            result,
            losses=tuple(loop.losses[:done]),
            step_ms=tuple(loop.clock.milliseconds()[:done]),
            clock=loop.clock.name,
            memory_bytes=self._peak_bytes or self._peak(loop),
            samples=self._batch * max(loop.backwards // loop.steps, 1),
            skipped_steps=loop.skipped,
            unreliable=doubt or still_compiling(loop.graphs[: done + 1], warmup),
            metric=self._reports.series,
        )
        if self._policy is None:
            return result
        state = StateSeen()
        if isinstance(spec, TrainSpec):
            state = state_seen(self._policy, self.found, self._monitors)
            skipped = loop.skipped + state.skipped_steps
            result = replace(result, skipped_steps=skipped, penalty=state.penalty, problems=state.problems)
        return self._audited(result, state) if result.ok else result

    def _audited(self, result: TrialResult, state: StateSeen) -> TrialResult:
        audit = self._policy.audit(self.found.root).to_json()
        audit["notes"] += [*state.hints, *self._warned]
        for part, row in state.audit.items():
            audit["operators"][f"optimizer.{part}"] = row
            audit["ok"] = audit["ok"] and row["ok"]
        return replace(result, audit=audit)
