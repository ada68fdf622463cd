"""The durable study: an in-memory Optuna study that is asked, and an RDB that holds every finished trial.

Optuna's RDB costs one transaction per suggested parameter; a trial is written here as one finished ``FrozenTrial``
instead, with all its parameters and figures, so that a crash at any moment leaves only whole trials behind: none
half-told, none RUNNING for ever. On resume the finished trials are replayed into a fresh in-memory study. Optuna's own
plots, tables and dashboard read the database as any other's: a ``COMPLETE`` trial is one that the sampler learned from;
finalists lie beside as ``PRUNED``, references, which decide nothing, as ``FAIL`` (their ``status`` says ok).
"""

from __future__ import annotations

import contextlib
import errno
import time
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TypeVar

import optuna
from optuna.trial import FrozenTrial, TrialState

from autoprec.errors import AutoPrecError, FileError, NoSpaceError, StudyError
from autoprec.support.files import canonical_json, resource_error, sqlite_url, with_checksum, without_checksum
from autoprec.support.plain import Document
from autoprec.tuning.study.naming import check_mistyped
from autoprec.tuning.study.run import REPAIR, Params, Run
from autoprec.tuning.study.sqlite_check import check_sqlite
from autoprec.tuning.study.storage import Claim, open_storage, patiently, process_limit, root_cause, without_password

optuna.logging.set_verbosity(optuna.logging.ERROR)

Distributions = Mapping[str, optuna.distributions.BaseDistribution]
R = TypeVar("R")

#: What SQLite and PostgreSQL say of a full disk, and SQLite of a file or folder that was removed or made read-only.
_FULL = ("disk is full", "No space left", "could not extend file")
_GONE = ("unable to open database file", "readonly database", "disk I/O error")

#: Characters of a parameter's name that Optuna's tables have room for; the record beside it has them all.
_LONGEST_NAME = 512
#: Kinds of records that the sampler learns from; references and finalists are stored beside them.
LEARNED = ("preset", "search")


def default_storage(study_dir: Path) -> str:
    """Return the URL of the study's own SQLite file."""
    return sqlite_url(study_dir / "study.db")


def _script_of(attrs: Mapping[str, object]) -> str | None:
    signature = attrs.get("signature")
    found = signature.get("script") if isinstance(signature, dict) else None
    return None if found is None else str(found)


class StudyStore:
    """One study in one storage.

    Args:
        url: an SQLAlchemy URL (SQLite by default, PostgreSQL for several machines).
        objectives: names of the minimised objectives, in order.
        resume: continue an existing study; without it an existing one is refused.
        may_begin: a study that is to be resumed and is missing begins, unless its name is mistyped.
        script: the script and its arguments, by which a mistyped name is told from a new one.
        tell: called with a note when a storage's server is waited for.
        started: ``time.monotonic()`` when this session began.

    Attributes:
        is_new: there was no such study before.

    Raises:
        StudyError: it exists and ``resume`` is off, does not exist and ``resume`` is on, or the storage is damaged.
    """

    def __init__(
        self,
        url: str,
        name: str,
        objectives: Sequence[str],
        *,
        resume: bool,
        may_begin: bool = False,
        script: str = "",
        tell: Callable[[str], None] = lambda _: None,
        started: float | None = None,
    ) -> None:
        self.url, self.name, self.objectives = without_password(url), name, tuple(objectives)
        check_sqlite(url, may_be_empty=may_begin or not resume, holds_studies=resume)
        self._address, self._tell = url, tell
        self._storage = self._guarded(lambda: open_storage(url))
        # Its connections are closed, not left to the collector; but not at the end of a process, which may be a fork.
        weakref.finalize(self, self._storage.engine.dispose).atexit = False
        there = {s.study_name: s.user_attrs for s in self._guarded(self._storage.get_all_studies)}
        self.is_new = name not in there
        if not self.is_new and not resume:
            raise StudyError(
                f"a study named '{name}' exists already", where=self.url, fix="add --resume, or --study NEW"
            )
        if self.is_new and resume:
            if not may_begin:
                what = f"no study named '{name}' was found to resume"
                raise StudyError(what, where=self.url, fix="is the address right? a new study begins without --resume")
            check_mistyped(name, there, lambda other: _script_of(there[other]), script, self.url)
            tell(f"there is no study {name} to resume yet: it begins")
        self._rdb = self._guarded(
            lambda: optuna.create_study(
                storage=self._storage, study_name=name, directions=["minimize"] * len(objectives), load_if_exists=True
            )
        )
        self._claim = Claim(url, self._rdb)
        self._guarded(self._claim.hold)
        if self._guarded(lambda: self._rdb.metric_names) is None:
            self._guarded(lambda: self._rdb.set_metric_names(list(self.objectives)))
        self.records: list[Run] = self._load()
        self._number = -1
        known = self._guarded(lambda: self._rdb.user_attrs).get("time_spent")
        known = known if isinstance(known, dict) else {}
        self._earlier_s, self.sessions = float(known.get("seconds", 0.0)), 1 + int(known.get("sessions", 0))
        self._started = time.monotonic() if started is None else started
        self.live: optuna.Study  # the study in memory that is asked, once it was started
        self._distributions: dict[str, optuna.distributions.BaseDistribution] = {}

    def _guarded(self, action: Callable[[], R]) -> R:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
                return action()
        except AutoPrecError:
            raise
        except Exception as error:
            text = root_cause(error)
            full = OSError(errno.ENOSPC, text) if any(words in text for words in _FULL) else None
            limit = resource_error(full or process_limit(self._address) or error, self.url)
            if limit is not None:
                limit.fix += "; then --resume"
                raise limit from error
            what = f"the study's storage cannot be used: {text}"
            fix = "is it running, damaged, or of another program? move it away, or use another --study or --storage"
            if any(words in text for words in _GONE):
                what = "the study's database is gone or cannot be written"
                fix = "put its folder back, and make it writable"
            raise StudyError(what, where=self.url, fix=fix) from error

    def close(self) -> None:
        """Release the study, so that another driver may continue it."""
        if self.records:
            with contextlib.suppress(StudyError, NoSpaceError):  # said where it matters: at the records
                self._guarded(self._keep_time)
        self._claim.release()

    def seconds(self) -> float:
        """Return the time that the study has taken, earlier sessions included up to their last record or their end."""
        return self._earlier_s + time.monotonic() - self._started

    def _keep_time(self) -> None:
        self._rdb.set_user_attr("time_spent", {"seconds": round(self.seconds(), 3), "sessions": self.sessions})

    def discard_empty(self) -> None:
        """Remove a study that holds nothing yet: its script never reached a training step."""
        if not self.records and self.signature is None:
            self._guarded(lambda: optuna.delete_study(study_name=self.name, storage=self._storage))

    def _load(self) -> list[Run]:
        """Return every stored run, or none: a study with a damaged trial would go on from what was never measured."""
        trials = self._guarded(lambda: self._rdb.get_trials(deepcopy=False))
        out = []
        for number, trial in enumerate(trials):
            whole = trial.number == number and trial.state.is_finished()
            where = f"{self.url}, study {self.name}, trial {trial.number}"
            out.append(Run.from_stored(trial.user_attrs if whole else {}, where=where))
        return out

    # --- settings ---------------------------------------------------------------------------------------------------
    @property
    def signature(self) -> Document | None:
        """The setup the study was started with; None before it was set.

        Raises:
            StudyError: it is damaged.
        """
        found = self._guarded(lambda: self._rdb.user_attrs).get("signature")
        if not isinstance(found, dict):
            return None
        where = f"{self.url}, study {self.name}, setup"
        try:
            return without_checksum(found, where=where)
        except FileError as error:
            raise StudyError(error.what, where=where, fix=REPAIR) from error

    def set_signature(self, signature: Document) -> None:
        """Store the setup that the study is started with."""
        self._guarded(lambda: self._rdb.set_user_attr("signature", with_checksum(signature)))

    # --- asking and telling -----------------------------------------------------------------------------------------
    def start(
        self,
        sampler: optuna.samplers.BaseSampler,
        distributions: Distributions,
        presets: Sequence[tuple[str, Params]],
    ) -> None:
        """Open the in-memory study: replay what is finished, then enqueue the presets that are not.

        Args:
            sampler: what proposes trials.
            distributions: what may be drawn of every parameter.
            presets: name and params of what is run first.
        """
        self._distributions = dict(distributions)
        live = optuna.create_study(directions=["minimize"] * len(self.objectives), sampler=sampler)
        for record in self.learned():
            live.add_trial(self._frozen(record))
        done = {canonical_json(record.params) for record in self.learned()}
        for name, params in presets:
            if canonical_json(params) not in done:
                live.enqueue_trial(dict(params), user_attrs={"preset": name})
        self.live = live

    def queued(self) -> bool:
        """Say whether presets are waiting to be asked."""
        return bool(self.live.get_trials(deepcopy=False, states=(TrialState.WAITING,)))

    def learned(self) -> list[Run]:
        """Return the finished records the sampler learns from, in order of their numbers."""
        return sorted((r for r in self.records if r.kind in LEARNED), key=lambda r: r.number)

    def ask(self) -> optuna.Trial:
        """Return the next trial, with all its parameters decided."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            return self.live.ask(self._distributions)

    def tell(self, trial: optuna.Trial, record: Run) -> None:
        """Store the finished run of a trial, and let the sampler know."""
        self.add(record)
        self._tell_live(trial, record, record.status)

    def forget(self, trial: optuna.Trial, known: Run) -> None:
        """Answer a proposal that was measured before with what is known, without running or storing it again."""
        self._tell_live(trial, known, "duplicate")

    def _tell_live(self, trial: optuna.Trial, record: Run, status: str) -> None:
        trial.set_user_attr("metrics", record.figures)
        trial.set_user_attr("status", status)
        values = self._values(record)
        failed = TrialState.PRUNED if status == "pruned" else TrialState.FAIL
        self.live.tell(trial, values, state=failed if values is None else None)

    def add(self, record: Run) -> None:
        """Store one finished run in one transaction, waiting for a server that is away for a while.

        Raises:
            NoSpaceError: the disk is full.
            StudyError: the storage is gone, or another driver holds the study.
        """
        tried = False

        def store() -> None:
            nonlocal tried
            self._claim.hold()
            # the answer to a transaction may be lost although it was done
            if not (tried and self._is_stored(record)):
                tried = True
                self._rdb.add_trial(self._frozen(record, store=True))
            self._keep_time()

        self._guarded(lambda: patiently(store, self._address, self._tell))
        self.records.append(record)

    def _is_stored(self, record: Run) -> bool:
        documents = [trial.user_attrs.get("record") or {} for trial in self._rdb.get_trials(deepcopy=False)]
        return any(document.get("number") == record.number for document in documents)

    def _values(self, record: Run) -> list[float] | None:
        if not record.ok:
            return None
        # floats, always: integer objectives crash Optuna 5's multi-objective TPE at the next ask
        return [float(record.get(name) or 0.0) for name in self.objectives]

    def _frozen(self, record: Run, *, store: bool = False) -> FrozenTrial:
        known = self._distributions
        params = {key: value for key, value in record.params.items() if key in known}
        if store:
            params = {key: value for key, value in params.items() if len(key) <= _LONGEST_NAME}
        values = self._values(record)
        state = TrialState.COMPLETE
        if values is None:
            state = TrialState.PRUNED if record.status == "pruned" else TrialState.FAIL
        elif record.kind not in LEARNED:
            # beside the trials, not one of them: Optuna's importances and plots are over what was decided, and its
            # dashboard draws the parameters that all but FAIL trials have
            state = TrialState.PRUNED if params else TrialState.FAIL
            values = values if params else None
        attrs = record.to_stored() if store else {"metrics": record.figures, "status": record.status}
        trial = optuna.trial.create_trial(
            state=state,
            values=values,
            params=params,
            distributions={key: known[key] for key in params},
            user_attrs=attrs,
        )
        if record.started:
            trial.datetime_start = datetime.fromtimestamp(record.started)
            trial.datetime_complete = datetime.fromtimestamp(record.started + record.seconds)
        return trial

    def count(self) -> dict[str, int]:
        """Return how many trials of the search (presets included) completed, failed, and were pruned."""
        learned = self.learned()
        ok = sum(r.ok for r in learned)
        pruned = sum(r.status == "pruned" for r in learned)
        return {"complete": ok, "failed": len(learned) - ok - pruned, "pruned": pruned}

    def next_number(self) -> int:
        """Take the number of the next run: it is given once, also while the run has not ended."""
        self._number = 1 + max([self._number, *(record.number for record in self.records)])
        return self._number
