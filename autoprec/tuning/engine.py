"""The search itself: what is measured when, and what each answer is used for (DESIGN section 5).

Phases: script, graph, reference, verdict, sensitivity, search, finalists, answer. The engine decides nothing about
precision; it asks :mod:`~autoprec.tuning.decide.problem`, :mod:`~autoprec.tuning.decide.sampler.sampler` and
:mod:`~autoprec.tuning.decide.decision`, runs what they propose, and keeps every result durable.
"""

from __future__ import annotations

import os
import threading
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from autoprec.cost import CostModel, CostScale, Verdict
from autoprec.cost.calibrate.cpu import cpu_rates
from autoprec.errors import AutoPrecError, NothingAcceptableError, SearchInterruptedError, StudyError
from autoprec.graph.report import GraphReport
from autoprec.policy import Policy, save_policy
from autoprec.policy.space import SearchSpace, default_space, load_space
from autoprec.support.files import file_lock, keep_earlier, write_json
from autoprec.trial.command import ScriptCommand
from autoprec.trial.protocol import HostInfo, TrialSpec
from autoprec.tuning.checks import check_early
from autoprec.tuning.context import Context, Limits
from autoprec.tuning.decide.problem import Problem
from autoprec.tuning.events import Listener, SearchInfo
from autoprec.tuning.options import SearchOptions, check_signature
from autoprec.tuning.phases.answer import Answer, emitted_policy, search_result
from autoprec.tuning.phases.finalists import run_finals
from autoprec.tuning.phases.members import save_front
from autoprec.tuning.phases.reference import measure_reference
from autoprec.tuning.phases.sensitivity import measure_table
from autoprec.tuning.phases.trials import run_trials
from autoprec.tuning.study.naming import free_name, is_numbered
from autoprec.tuning.study.records import SearchResult, TrialRecord
from autoprec.tuning.study.storage import sqlite_file
from autoprec.tuning.study.study import StudyStore, default_storage
from autoprec.tuning.target import calibration_of, resolve_target
from autoprec.tuning.workers.executors import runner_factory
from autoprec.tuning.workers.local import HostPool, RunnerFactory
from autoprec.tuning.workers.slots import visible_gpus

__all__ = ["Search"]


class Search:
    """One search of one script.

    Args:
        options: what was asked.
        command: the script.
        listener: who is told.
        factory: starts a host; the default runs real processes.

    Attributes:
        study_dir: folder of the study's files.
        graph: the recorded step; None until it was recorded.
    """

    def __init__(
        self, options: SearchOptions, command: ScriptCommand, listener: Listener, factory: RunnerFactory | None = None
    ) -> None:
        name = options.study or free_name(options, command)
        self.options = replace(options, study=name)
        self._numbered = not (options.study or options.resume) and is_numbered(name, options.runs_dir)
        self.command, self.listener = command, listener
        self.study_dir: Path = self.options.study_dir()
        self.graph: GraphReport | None = None
        self.context: Context | None = None
        self._factory = factory
        self._started = time.monotonic()
        self._calibration: dict[str, Any] | None = None

    @property
    def records(self) -> list[TrialRecord]:
        """Every finished record of the study, references and finalists included."""
        return list(self.context.store.records) if self.context else []

    def run(self) -> SearchResult:
        """Search, and return the answer.

        Raises:
            ScriptError: the script failed before its first training step.
            NothingAcceptableError: there is nothing to tune, or nothing could be measured.
            StudyError: the study exists, is locked, damaged, or was started with another setup.
            SearchInterruptedError: Ctrl-C or SIGTERM; the best policy so far was written.
        """
        check_early(self.options)
        calibration_of(self.options)
        with ExitStack() as stack:
            stack.enter_context(file_lock(self.study_dir / "lock"))
            named = sqlite_file(self.options.storage)
            if named is not None:  # it may be the storage of a search that was started in another directory
                stack.enter_context(file_lock(named.with_name(f"{named.name}.{self.options.study}.lock")))
            factory = self._factory or runner_factory(self.options, self.command)
            pool = stack.enter_context(HostPool(factory, self.study_dir / "hosts"))
            try:
                return self._run(pool, stack)
            except (KeyboardInterrupt, SystemExit) as stop:
                raise self._interrupted(stop) from stop
            except NothingAcceptableError:
                raise  # going on would change nothing
            except AutoPrecError as error:
                if self.context is not None:  # the study was begun, and holds all that was finished
                    error.fix += f"; then continue with:\n    {self.options.resume_command()}"
                raise

    def _run(self, pool: HostPool, stack: ExitStack) -> SearchResult:
        self.listener.phase("script", self.command.label)
        if self._numbered:
            self.listener.note(f"this is the new study {self.options.study}; --resume would continue the latest one")
        pool.prepare(0)
        probe = self._probe_cpu()
        if self.options.calibration:  # refused before the study is begun; else that overlaps with the script's start
            self._calibration = calibration_of(self.options, pool.info(0).device)
        store = self._open_store()
        stack.callback(store.close)
        host = pool.info(0)
        self.listener.phase("graph")
        graph = self.graph = self._record(pool)
        probe.join()
        context = self._context(pool, store, host, graph)
        self._sign(context)
        self.context = context  # only now: under another setup nothing is continued
        self.listener.started(self._info(context))
        if not context.measured:
            context.note(f"times are {context.cost.label}")
        self.listener.phase("reference")
        measure_reference(context)
        self.listener.phase("verdict")
        verdict = self._verdict(context)
        if verdict.kind == "stay" and not self.options.force:
            return self._stay(context, verdict)
        self.listener.phase("sensitivity")
        measure_table(context)
        self.listener.phase("search")
        run_trials(context)
        self.listener.phase("finalists")
        answer = run_finals(context)
        self.listener.phase("answer")
        return self._finish(context, answer, verdict)

    def _probe_cpu(self) -> threading.Thread:
        """Fit the rates of this CPU (seconds, once per machine) while the script starts, never beside a timed step."""
        cpu = self.options.target == "cpu" or (self.options.target == "auto" and not visible_gpus(dict(os.environ)))
        thread = threading.Thread(target=cpu_rates if cpu else time.time, name="cpu-rates", daemon=True)
        thread.start()
        return thread

    def _open_store(self) -> StudyStore:
        url = self.options.storage or default_storage(self.study_dir)
        # killed before the study's first transaction, unless the graph is there, which is written after it
        begun = not self.options.storage and not (self.study_dir / "graph.json").exists()
        begun = begun and (self.study_dir / "study.db").exists()
        objectives = ("step_time_ms", "divergence")
        return StudyStore(
            url, self.options.study, objectives, resume=self.options.resume, begun=begun, tell=self.listener.note
        )

    def _record(self, pool: HostPool) -> GraphReport:
        result = pool.run(TrialSpec(kind="record", steps=1, timeout_s=600))
        if not result.ok:
            raise NothingAcceptableError(
                f"the training step could not be recorded: {result.reason}",
                where=self.command.label,
                fix=f"the trial printed:\n{result.tail}" if result.tail else "run it with -v",
            )
        graph = GraphReport.from_json(result.payload["graph"])
        write_json(self.study_dir / "graph.json", graph.to_json(), indent=None)
        if not graph.tunable:
            reasons = "; ".join(sorted({layer.reason for layer in graph.layers})[:3]) or "no linear or conv layer ran"
            raise NothingAcceptableError(
                f"this script has no trainable GEMM to tune: {reasons}",
                where=self.command.label,
                fix="`autoprec inspect` lists every operator and why it is not tunable",
            )
        return graph

    def _context(self, pool: HostPool, store: StudyStore, host: HostInfo, graph: GraphReport) -> Context:
        options = self.options
        target, here = resolve_target(options.target, host.device)
        space: SearchSpace = load_space(options.space) if options.space else default_space(target)
        scale = CostScale.parse(options.cost_scale) if options.cost_scale else None
        measured = here and scale is None
        space = space.executed(compiled=host.compiled, measured=measured)
        cost = CostModel(
            graph, target, scale=scale, compiled=host.compiled or not measured, calibration=self._calibration
        )
        problem = Problem.build(graph, space, cost.can_run)
        return Context(
            options=options,
            listener=self.listener,
            pool=pool,
            store=store,
            host=host,
            graph=graph,
            target=target,
            measured=measured,
            space=space,
            problem=problem,
            cost=cost,
            limits=Limits(options.max_divergence, options.max_gradient_error, options.max_memory),
            study_dir=self.study_dir,
            started=self._started,
        )

    def _sign(self, context: Context) -> None:
        signature = self.options.signature(
            context.space.model_dump_json(), str(context.graph.model["fingerprint"]), self._calibration
        )
        stored = context.store.signature
        if stored is None and context.store.records:
            raise StudyError(
                "the study is damaged: it has trials and no setup",
                where=f"{context.store.url}, study {self.options.study}",
                fix="put an intact copy of the database back, or begin again with --study NEW",
            )
        if stored is None:
            if self._calibration is not None:  # what a resumed search must be given again, should the file be gone
                write_json(self.study_dir / "calibration.json", self._calibration)
            context.store.set_signature(signature)
        else:
            check_signature(stored, signature, where=f"study {self.options.study}")

    def _info(self, context: Context) -> SearchInfo:
        notes = (*context.host.notes, *context.graph.notes)
        for note in context.host.notes:
            self.listener.note(note)
        return SearchInfo(
            study=self.options.study,
            study_dir=str(self.study_dir),
            storage=context.store.url,
            script=self.command.label,
            target=context.target.name,
            source=context.source,
            launch=context.host.launch,
            device=context.host.device,
            model=context.graph.model,
            groups={group.name: group.layers for group in context.problem.groups},
            trials=self.options.trials,
            resume_command=self.options.resume_command(),
            notes=notes,
        )

    def _verdict(self, context: Context) -> Verdict:
        problem = context.problem
        plans = {name: problem.plans(problem.params_of(name)) for name in problem.choice_names}
        verdict = context.cost.verdict(plans)
        context.timings["verdict_s"] = time.monotonic() - self._started
        if verdict.kind != "stay":
            # beside real timings the model's sentence would claim too much: it bounds the GEMMs, not attention or casts
            bound = f"GEMMs could gain up to {verdict.bound_speedup:.2f}x by the cost model; the trials decide"
            self.listener.note(bound if context.measured else verdict.reason)
        return verdict

    def _stay(self, context: Context, verdict: Verdict) -> SearchResult:
        answer = Answer(verdict="stay", reason=verdict.reason, record=None, seeds=0)
        return self._finish(context, answer, verdict)

    def _finish(self, context: Context, answer: Answer, verdict: Verdict) -> SearchResult:
        policy = emitted_policy(context, answer)
        self._emit(policy)
        save_policy(policy, self.study_dir / "best.yaml")
        result = search_result(context, answer, verdict, policy_path=self.options.output)
        save_front(context, result, self.study_dir / "front")
        self.listener.finished(result)
        return result

    def _emit(self, policy: Policy) -> None:
        """Write the policy where it was asked for; what was there, and is not this study's, is kept beside it."""
        output, own = Path(self.options.output), self.study_dir / "policy.yaml"
        kept = keep_earlier(output, own)
        if kept is not None:
            self.listener.note(f"there was a {output} already: it is now {kept}")
        save_policy(policy, output)
        save_policy(policy, own)

    def _interrupted(self, stop: BaseException) -> SearchInterruptedError:
        code = 143 if isinstance(stop, SystemExit) and stop.code == 143 else 130
        context, kept = self.context, "nothing was measured yet"
        best = context.best() if context else None
        if context is not None and best is not None:
            policy = emitted_policy(context, Answer("adopt", "interrupted before the finalists", best, seeds=1))
            kept = f"the best policy so far ({best.metrics['speedup']:.2f}x) is in {self.options.output}"
            try:
                self._emit(policy)
            except AutoPrecError as error:
                kept = f"the best policy so far could not be saved: {error.what}"
        return SearchInterruptedError(
            f"interrupted; {kept}", fix=f"continue with:\n    {self.options.resume_command()}", exit_code=code
        )
