"""The search: what is measured when, and what each answer is used for (docs/concepts.md).

A search runs the script, records one step, and asks the cost model whether anything can be gained at all. If so it
measures the reference and its noise floor, then the gradient error of every layer under every recipe (the sensitivity
scan), then short trials that a sampler proposes from both, and further paired seeds of what may be adopted; what the
decision rests on is timed in duels. The engine decides nothing about precision: it calls the phases in order and keeps
every result durable.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from autoprec.cost.device.cpu import cpu_rates
from autoprec.errors import AutoPrecError, NothingAcceptableError, ScriptError, SearchInterruptedError, StudyError
from autoprec.graph.report import GraphReport
from autoprec.policy import Policy, load_policy, save_policy
from autoprec.support.files import file_lock, keep_earlier, read_document, write_atomic, write_json
from autoprec.support.plain import Document
from autoprec.trial.command import ScriptCommand, parse_variants
from autoprec.trial.protocol import PATIENCE_S, HostInfo
from autoprec.trial.source import source_digests
from autoprec.tuning.checks import check_early
from autoprec.tuning.decide.decision import Decision
from autoprec.tuning.decide.sentences import Reason
from autoprec.tuning.decide.table import SensitivityTable
from autoprec.tuning.events import Listener
from autoprec.tuning.options import SearchOptions, check_signature
from autoprec.tuning.paired import OVERRUN, PairedRunner
from autoprec.tuning.phases.answer import (
    emitted_policy,
    final_metrics,
    named_over,
    save_front,
    search_result,
    settled,
    with_size,
)
from autoprec.tuning.phases.record import record_step, tunable
from autoprec.tuning.phases.reference import check_time, expected, measure_reference, not_started
from autoprec.tuning.phases.sensitivity import measure_table
from autoprec.tuning.phases.trials import run_study
from autoprec.tuning.phases.variants import AS_GIVEN, NOT_TRIED, SHARE, choose, shapes
from autoprec.tuning.setup import Setup
from autoprec.tuning.sixteen_bit import Bound, bound_of
from autoprec.tuning.state import SearchState
from autoprec.tuning.study.kept import KeptAnswers, origin_of
from autoprec.tuning.study.naming import check_named, free_name, is_numbered, may_begin
from autoprec.tuning.study.records import SearchResult
from autoprec.tuning.study.run import REPAIR, Run, headline
from autoprec.tuning.study.storage import sqlite_file
from autoprec.tuning.study.study import StudyStore, default_storage
from autoprec.tuning.telling import introduction, notes_of_bound, typed, verdict_text
from autoprec.tuning.workers.engines import runner_factory
from autoprec.tuning.workers.local import HostPool, RunnerFactory
from autoprec.tuning.workers.slots import visible_gpus


@dataclass(frozen=True, slots=True)
class _Host:
    """The script at its first training forward: its hosts, its study, and how long it took to come there.

    ``cpu_rates`` measures this machine's rates meanwhile; ``sources`` are digests of what was started, and ``kept`` is
    what an earlier session was answered of it.
    """

    pool: HostPool
    store: StudyStore
    info: HostInfo
    start_s: float
    cpu_rates: threading.Thread
    sources: dict[str, str]
    kept: KeptAnswers


class Search:
    """One search of one script.

    Args:
        factory: starts a host; the default runs real processes.
        started: ``time.monotonic()`` of what a person waits for and a time budget counts from; default: now.

    Attributes:
        study_dir: folder of the study's files.
        graph: the recorded step; None until it was recorded.
        setup, state: what is searched, and what was learnt; None until the study was begun or continued.
    """

    def __init__(
        self,
        options: SearchOptions,
        command: ScriptCommand,
        listener: Listener,
        factory: RunnerFactory | None = None,
        *,
        started: float | None = None,
    ) -> None:
        name = options.study or free_name(options, command)
        self.options = replace(options, study=name)
        self._unnamed, self._is_new, self._made_folder = not (options.study or options.resume), False, False
        self.command, self.listener = command, listener
        self.study_dir: Path = self.options.study_dir()
        self.graph: GraphReport | None = None
        self.setup: Setup | None = None
        #: What became of a policy that was there before; empty where none was.
        self.set_aside = ""
        self.state: SearchState | None = None
        self._factory = factory
        self._started = time.monotonic() if started is None else started
        self._store: StudyStore | None = None
        self._variants: list[dict[str, Any]] = []
        self._pools: dict[str, HostPool] = {}

    @property
    def records(self) -> list[Run]:
        """Every finished record of the study, references and finalists included."""
        return list(self._store.records) if self._store else []

    def timed(self, result: SearchResult) -> SearchResult:
        """Return a result with the seconds until now: what follows a search, MLflow, takes its time as well."""
        timings = result.timings | {"total_s": round(time.monotonic() - self._started, 3)}
        seconds = self._store.seconds() if self._store is not None else result.seconds
        return replace(result, seconds=seconds, timings=timings)

    def run(self) -> SearchResult:
        """Search, and return the answer.

        Raises:
            ScriptError: the script failed before its first training step.
            NothingAcceptableError: there is nothing to tune, or nothing could be measured.
            StudyError: the study exists, is locked, damaged, or was started with another setup.
            SearchInterruptedError: Ctrl-C or SIGTERM; the best policy so far was written.
        """
        check_early(self.options)
        check_named(self.options)
        try:
            return self._locked()
        except ScriptError:
            if self._is_new and self.state is None:  # a mistake in its arguments leaves no study behind
                shutil.rmtree(self.study_dir, ignore_errors=True)
                with contextlib.suppress(OSError):  # other studies may be there
                    folder = self.study_dir.parent
                    if self._made_folder and [path.name for path in folder.iterdir()] == [".gitignore"]:
                        shutil.rmtree(folder)
            raise

    def _locked(self) -> SearchResult:
        """Search while no other process may."""
        with ExitStack() as stack:
            self._claim(stack)
            named = sqlite_file(self.options.storage)
            if named is not None:  # it may be the storage of a search that was started in another directory
                stack.enter_context(file_lock(named.with_name(f"{named.name}.{self.options.study}.lock")))
            if not self.options.resume:  # of a study that was removed
                KeptAnswers(self.study_dir / "kept", self.study_dir / "hosts", "").clear()
            try:
                self._choose_variant(stack)
                return self._run(self._pools[self._chosen["name"] if self._chosen else AS_GIVEN], stack)
            except (KeyboardInterrupt, SystemExit) as stop:
                raise self._interrupted(stop) from stop
            except NothingAcceptableError:
                raise  # going on would change nothing
            except AutoPrecError as error:
                if self.state is not None:  # the study was begun, and holds all that was finished
                    error.fix += f"; then continue with:\n    {self.options.resume_command()}"
                raise

    def go_on_command(self) -> str:
        """Return the command that continues the search, with a budget that is enough where this one was not."""
        return self.options.with_budget_for(self.state.needed_s if self.state else 0.0).resume_command()

    def _claim(self, stack: ExitStack) -> None:
        """Hold the study's folder; a study without a name takes the next one where another search holds it."""
        held: list[str] = []
        self._made_folder = not self.study_dir.parent.exists()
        if self._made_folder:  # nothing in it is for a repository
            write_atomic(self.study_dir.parent / ".gitignore", "*\n")
        while True:
            self._is_new = not self.study_dir.exists()
            try:
                with ExitStack() as attempt:
                    attempt.enter_context(file_lock(self.study_dir / "lock"))
                    if not (self._unnamed and (self.study_dir / "study.db").exists()):
                        stack.push(attempt.pop_all())
                        return
            except StudyError:
                if not self._unnamed:
                    raise
            held.append(self.options.study)
            asked = replace(self.options, study="")
            self.options = replace(asked, study=free_name(asked, self.command, held))
            self.study_dir = self.options.study_dir()

    def _run(self, pool: HostPool, stack: ExitStack) -> SearchResult:
        """The eight steps of a search (docs/search.md)."""
        host = self._start_script(pool, stack)
        graph = self._record_graph(host)
        bound = self._bound_gain(host, graph)
        runner, state = self._begin_study(host, bound)
        if bound.ends:
            decision = Decision("stay", (Reason("cost_model", {"text": bound.verdict.reason}),))
        else:
            self._measure_reference(bound, runner, state)
            table = self._measure_errors(bound, runner, state)
            decision = run_study(bound.setup, runner, state, table)
        result = self._answer(bound, runner, state, decision)
        if not state.cut_short:  # one that ran out of time is continued from there
            host.kept.clear()
        return result

    def _start_script(self, pool: HostPool, stack: ExitStack) -> _Host:
        """Start the script, and wait until it is at its first training forward."""
        if self.options.resume and self._store is None:
            self._open_store(stack)
        self.listener.phase("script", self.command.label)
        if self._unnamed and is_numbered(self.options.study):
            self.listener.note(f"this is the new study {self.options.study}; --resume would continue the latest one")
        sources = source_digests(self.command)  # before the script is started: an edit then belongs to the next session
        pool.prepare(0)
        began, probe = time.monotonic(), self._probe_cpu()
        store = self._store or self._open_store(stack)
        budget, elapsed_s = self.options.budget_s, time.monotonic() - self._started
        try:
            info = pool.info(0, None if budget is None else max(0.0, OVERRUN * budget - elapsed_s))
        except ScriptError:
            store.discard_empty()
            raise
        except TimeoutError as late:
            raise not_started(self.options, self.command.label, time.monotonic() - self._started) from late
        # it may have been started for its variants
        start_s = max(time.monotonic() - began, info.setup_s)
        host = _Host(pool, store, info, start_s, probe, sources, self._answers(self.command, sources, info))
        self._check_time(host, starts=2)  # for the recorded step, and for the reference
        return host

    def _answers(self, command: ScriptCommand, sources: dict[str, str], info: HostInfo) -> KeptAnswers:
        return KeptAnswers(self.study_dir / "kept", self.study_dir / "hosts", origin_of(command, sources, info))

    def _record_graph(self, host: _Host) -> GraphReport:
        """Record one step: which operators ran, on which shapes, and what of them can be tuned."""
        self.listener.phase("graph")
        graph = self.graph = tunable(self._record(host), self.command.label)
        write_json(self.study_dir / "graph.json", graph.to_json(), indent=None)
        return graph

    def _record(self, host: _Host, policy: Document | None = None) -> GraphReport:
        return record_step(lambda spec: host.kept.ask(spec, host.pool.host().run), self.command.label, policy=policy)

    def _bound_gain(self, host: _Host, graph: GraphReport) -> Bound:
        """Ask the cost model what could be gained at most, and in which part of the space."""
        host.cpu_rates.join()
        self._check_time(host, starts=1)
        whole = Setup.of(self.options, host.info, graph, shapes(self._variants))
        return bound_of(whole, self.command, partial(self._record, host))

    def _begin_study(self, host: _Host, bound: Bound) -> tuple[PairedRunner, SearchState]:
        """Sign the study, or go on with it, and say what is searched."""
        setup = bound.setup
        self._sign(setup, host)
        state = SearchState(
            host.store,
            self.listener,
            setup.options,
            self._started,
            variants=self._variants,
            only_sixteen_bit=bound.narrow,
        )
        self.setup, self.state = setup, state  # only now: under another setup nothing is continued
        others = {name: pool for name, pool in self._pools.items() if pool is not host.pool}
        state.seconds.first_step_s = host.start_s - host.info.setup_s
        runner = PairedRunner(setup, host.pool, state, others=others, kept=host.kept)
        for note in (*host.info.notes, *setup.space.warnings()):
            self.listener.note(note)
        self.listener.started(introduction(setup, self.command, self.options, host.store.url, self._chosen))
        if doubt := bound.soundness.told(short=True):
            self.listener.note(str(doubt))
        if not setup.measured:
            state.note(f"times are {setup.cost.label}")
        self.listener.phase("verdict", verdict_text(setup, bound.verdict))
        for note in notes_of_bound(setup, narrow=bound.narrow, beyond=bound.beyond):
            state.note(note)
        state.seconds.verdict_s = state.elapsed()
        missed = [row["name"] for row in self._variants if row["status"] == NOT_TRIED]
        if missed and host.store.is_new:
            state.cut(f"the time budget left no time for the script under {', '.join(missed)}")
        return runner, state

    def _measure_reference(self, bound: Bound, runner: PairedRunner, state: SearchState) -> None:
        """Run the script as written, and say how long the search will take."""
        self.listener.phase("reference")
        with bound.soundness.naming():
            measure_reference(bound.setup, runner, state, flat_because=bound.soundness.why_flat())
        runner.doubt_load()
        for line in expected(bound.setup, runner, state):
            if state.store.is_new:
                self.listener.note(line)

    def _measure_errors(self, bound: Bound, runner: PairedRunner, state: SearchState) -> SensitivityTable:
        """Measure the gradient error of every group of layers under every choice."""
        self.listener.phase("sensitivity")
        with bound.soundness.naming():
            return measure_table(bound.setup, runner, state)

    def _answer(self, bound: Bound, runner: PairedRunner, state: SearchState, decision: Decision) -> SearchResult:
        """Write the policy, and return the result."""
        answer = named_over(settled(decision, state), self.options.reference)
        if bound.narrow:
            data = {"bound": bound.verdict.bound_speedup, "cause": bound.verdict.cause}
            answer = answer.with_reasons(Reason("only_sixteen_bit", data))
        answer = answer if bound.ends else with_size(answer, bound.setup)
        rows = {"chosen": self._chosen or {}, "adopted": state.variant(answer.run)}
        if any(rows.values()):
            answer = answer.with_reasons(Reason("under_variant", rows))
            self.listener.phase("answer")
        losses = state.own.losses if state.own is not None else ()
        answer = bound.soundness.qualify(answer, bound.setup, state.store.records, losses)
        return self._finish(bound, state, answer, runner)

    def _check_time(self, host: _Host, *, starts: int) -> None:
        """End a search that cannot know anything within its time budget; one that goes on knows what it had found."""
        if not host.store.records:
            check_time(self.options, host.info, time.monotonic() - self._started, host.start_s, starts=starts)

    @property
    def _chosen(self) -> dict[str, Any] | None:
        """The row of the variant that the search is of; None for the script as it was given."""
        return next((row for row in self._variants if row.get("chosen")), None)

    def _choose_variant(self, stack: ExitStack) -> None:
        """Search under the variant that is surely faster as it is, if any; a resumed search under the same one."""
        kept, asked = self.study_dir / "variants.json", parse_variants(self.options.variant)
        if self.options.resume and kept.exists():
            names = [variant.name for variant in asked]
            self._variants = [row for row in read_document(kept)["rows"] if row["name"] in names]
        elif asked:
            budget = self.options.budget_s or math.inf
            store = self._open_store(stack)  # so that one that is killed from here on can be continued
            self.listener.phase("variants")
            try:
                self._variants, self._pools = choose(
                    self.options,
                    self.command,
                    self._hosts,
                    self.study_dir / "hosts",
                    lambda: SHARE * budget - (time.monotonic() - self._started),
                    stack,
                    partial(self._answers, self.command, source_digests(self.command)),
                )
            except ScriptError:
                store.discard_empty()
                raise
            write_json(kept, {"rows": self._variants})
            for row in self._variants:
                self.listener.note(f"variant {typed(row)}: {row['status']}: {row['reason']}")
        commands = {AS_GIVEN: self.command} | {variant.name: self.command.under(variant) for variant in asked}
        self.command = commands[self._chosen["name"] if self._chosen else AS_GIVEN]
        for name, command in commands.items():  # which start nothing before they are asked
            folder = self.study_dir / "hosts" / (name.replace(" ", "-") if asked else "")
            if name not in self._pools:
                self._pools[name] = stack.enter_context(HostPool(self._hosts(command), folder))

    def _hosts(self, command: ScriptCommand, start_s: float = PATIENCE_S) -> RunnerFactory:
        return self._factory or runner_factory(self.options, command, start_s)

    def _probe_cpu(self) -> threading.Thread:
        """Time three products on this CPU (seconds) while the script starts, never beside a timed step."""
        cpu = self.options.target == "cpu" or (self.options.target == "auto" and not visible_gpus(dict(os.environ)))
        thread = threading.Thread(target=cpu_rates if cpu else time.time, name="cpu-rates", daemon=True)
        thread.start()
        return thread

    def _open_store(self, stack: ExitStack) -> StudyStore:
        url = self.options.storage or default_storage(self.study_dir)
        self._store = StudyStore(
            url,
            self.options.study,
            ("step_time_ms", "divergence"),
            resume=self.options.resume,
            may_begin=may_begin(self.study_dir),
            script=self.options.script_text(),
            tell=self.listener.note,
            started=self._started,
        )
        stack.callback(self._store.close)
        return self._store

    def _sign(self, setup: Setup, host: _Host) -> None:
        """Remember what the study was started with, or refuse to go on with another setup.

        Raises:
            StudyError: the setup differs, or the stored one is lost.
        """
        model, store = str(setup.graph.model["fingerprint"]), host.store
        signature = self.options.signature(setup.space.model_dump_json(), model, host.sources)
        if self._chosen is not None:
            signature["variant"] = typed(self._chosen)
        stored = store.signature
        if stored is None and store.records:
            where = f"{store.url}, study {self.options.study}"
            raise StudyError("the study is damaged: it has trials and no setup", where=where, fix=REPAIR)
        if stored is None:
            store.set_signature(signature)
        else:
            check_signature(stored, signature, where=f"study {self.options.study}")

    def _finish(self, bound: Bound, state: SearchState, answer: Decision, runner: PairedRunner) -> SearchResult:
        setup, path = bound.setup, ""
        if answer.verdict != "undecided":
            policy = emitted_policy(setup, state, answer)
            path = self._emit(policy)
            save_policy(policy, self.study_dir / "best.yaml")
        result = search_result(
            setup, state, answer, runner, bound_speedup=bound.verdict.bound_speedup, policy_path=path
        )
        save_front(setup, state, result)
        self.listener.finished(result)
        return result

    def _emit(self, policy: Policy) -> str:
        """Write the policy where it was asked for, and return that path.

        The file that was asked for always holds this search's answer, also where that is to stay: the script must not
        train under an earlier search's. What was there and is not this study's is kept beside it, unless it changed
        nothing.
        """
        output, own = Path(self.options.output), self.study_dir / "policy.yaml"
        kept = None if _changes_nothing(output) else keep_earlier(output, own)
        if kept is not None:
            self.set_aside = f"there was a {output} already: it is now {kept}"
            self.listener.note(self.set_aside)
        save_policy(policy, output)
        save_policy(policy, own)
        return self.options.output

    def _interrupted(self, stop: BaseException) -> SearchInterruptedError:
        code = 143 if isinstance(stop, SystemExit) and stop.code == 143 else 130
        setup, state = self.setup, self.state
        kept = state.measured_text() if state is not None else "nothing was measured yet"
        best = state.best() if state is not None else None
        if setup is not None and state is not None and best is not None:
            answer = Decision("undecided", (Reason("interrupted"),), ranking=state.ranking.standings, run=best)
            policy = emitted_policy(setup, state, answer)
            gain = headline(final_metrics(setup, state, answer), self.options.reference)
            kept = f"the best policy so far ({gain}) is in {self.options.output}"
            try:
                self._emit(policy)
            except AutoPrecError as error:
                kept = f"the best policy so far could not be saved: {error.what}"
        return SearchInterruptedError(
            f"interrupted; {kept}", fix=f"continue with:\n    {self.options.resume_command()}", exit_code=code
        )


def _changes_nothing(path: Path) -> bool:
    """Say whether a file is what an earlier search wrote whose answer was to stay."""
    try:
        return load_policy(path).evidence.get("verdict") == "stay"
    except AutoPrecError:
        return False
