"""The search as a Python call: what ``autoprec search`` does, without the terminal; also for a function that trains."""

from __future__ import annotations

import contextlib
import os
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from autoprec.errors import StudyError, UsageError
from autoprec.support.optional import require
from autoprec.support.tables import Shown, Table
from autoprec.trial.protocol import STEPS
from autoprec.tuning.study import records
from autoprec.tuning.study.run import headline

if TYPE_CHECKING:
    import optuna
    import pandas

__all__ = ["SearchResult", "search"]


@dataclass(frozen=True, slots=True, repr=False)
class SearchResult(Shown, records.SearchResult):
    """The outcome of a search (:class:`autoprec.tuning.study.records.SearchResult`), with what can be done with it.

    ``print(result)`` and notebooks show the policy beside the script and the presets; ``result.study`` is the
    Optuna study, ``result.to_pandas()`` its trials, ``autoprec.load(result.policy)`` the policy.
    """

    #: The storage with its password, which ``storage`` hides; never printed or written.
    _address: str = field(default="", repr=False, compare=False)

    @classmethod
    def of(cls, result: records.SearchResult, storage: str = "") -> Self:
        """Return a result with its methods; ``storage`` as it was given."""
        shared = {one.name: getattr(result, one.name) for one in fields(records.SearchResult)}
        return cls(**shared, _address=storage or result.storage)

    @property
    def study(self) -> optuna.Study:
        """The study in Optuna, for its plots, its importances and its dashboard.

        Objectives are ``step_time_ms`` and ``divergence``; complete trials have every parameter, and figures, kind and
        status as user attributes. Finalists lie beside them as pruned trials, references, which
        have no parameters, as failed ones.

        Raises:
            StudyError: the database is gone.
        """
        import optuna

        try:
            return optuna.load_study(study_name=self.study_name, storage=self._address or self.storage)
        except Exception as error:  # of SQLAlchemy, of a driver, or Optuna's KeyError
            raise StudyError(
                f"the study '{self.study_name}' cannot be opened: {error}", where=self.storage, fix="was it moved?"
            ) from error

    def to_pandas(self) -> pandas.DataFrame:
        """Return a row for each run: number, kind, name, status, figures, then every parameter under its own name."""
        pandas = require("pandas", purpose="result.to_pandas()")
        rows = []
        for trial in self.study.get_trials(deepcopy=False):
            about = {key: value for key, value in trial.user_attrs.items() if key != "record"}
            first = {key: about.pop(key, None) for key in ("kind", "name", "status", "reason", "seed", "tags")}
            rows.append({"number": trial.number, **first, **about, **trial.params})
        return pandas.DataFrame(rows).set_index("number") if rows else pandas.DataFrame()

    def to_json(self) -> dict[str, Any]:
        """Return the JSON document of ``autoprec search --json``."""
        return {key: value for key, value in records.SearchResult.to_json(self).items() if key != "_address"}

    def table(self) -> Table:
        """Return the policy, the script as written and the presets, with the verdict below."""
        from autoprec.report.terminal import result_table

        return result_table(self)

    def __repr__(self) -> str:
        gain = f", {headline(self.best)}" if "speedup" in self.best else ""
        return f"SearchResult({self.verdict}{gain}, policy={self.policy!r}, study_name={self.study_name!r})"


def search(
    script: str | os.PathLike[str] | Sequence[str] | Callable[[], Any],
    *,
    target: str = "auto",
    space: str = "",
    trials: int = 30,
    budget_s: float | None = None,
    steps: int = STEPS,
    warmup: int = 3,
    max_divergence: float = 0.0025,
    max_gradient_error: float = 0.12,
    max_memory: int | None = None,
    objective: str = "throughput",
    reference: str = "script",
    seed: int = 0,
    output: str = "policy.yaml",
    study: str = "",
    storage: str = "",
    resume: bool = False,
    workers: int = 0,
    engine: str = "local",
    ray_address: str = "",
    gpus_per_trial: int = 1,
    sampler: str = "ours",
    cost_scale: str = "",
    calibration: str = "",
    force: bool = False,
    seeds: int = 4,
    run_steps: int = 0,
    phases: str = "",
    at_step: int = 0,
    at: str = "",
    backend: str = "auto",
    runs_dir: str = "autoprec-runs",
    track: bool = True,
    progress: bool = False,
) -> SearchResult:
    """Search the precision policy that trains a script fastest without changing its loss curve.

    Args:
        script: the command line of the script, as text (``"train.py --lr 3e-4"``) or as tokens; or a function that
            trains when it is called, which is run in processes of its own (``functools.partial`` gives it arguments).
        target: ``auto`` (the device the script trains on, timed), or a name of ``autoprec targets`` (modelled).
        space: a shipped search space, or a file; empty: the one that suits the target.
        trials, budget_s: the most trials and seconds; it ends earlier when nothing left is worth a trial.
        steps, warmup: training steps of a trial that are scored, and those before them that are not.
        max_divergence: accepted mean relative loss gap, as a fraction (0.0025 is 0.25 %).
        max_gradient_error: accepted gradient error, as a share of the mini-batch gradient noise.
        max_memory: accepted peak memory in bytes.
        objective: ``throughput``, ``memory`` or ``balanced``.
        reference: what divergence is measured against: ``script``, ``fp32`` or ``bf16``.
        seed: the first paired seed, and the seed of the sampler.
        seeds: paired seeds of a policy where the loss cannot judge; elsewhere two to 24, as the decision needs.
        run_steps, phases: steps of the whole run, and its parts in bf16: ``first-bf16``, ``last-bf16`` or both.
        at_step, at: the step at which trials start, and steps (``"0,1000"``) of which the worst gradient error counts.
        output: where the policy is written.
        study, storage, resume: name and database of the study, and whether to continue it.
        workers, engine: trials side by side (0: as many as can be timed; 2 on one GPU: one compiles while another is
            timed), ``local`` or on a ``ray`` cluster.
        ray_address, gpus_per_trial: the Ray cluster, and the GPUs that one trial takes there.
        sampler: ``ours``, ``tpe``, ``nsga2``, ``random``, ``gp``, ``ilp`` or ``greedy``.
        cost_scale, calibration: model time at larger shapes (``"width=16,depth=4,tokens=32"``), with measured rates.
        force: search although the verdict is that nothing can be gained.
        backend: who runs the GEMMs, see ``autoprec doctor``.
        runs_dir: folder of all studies.
        track, progress: log trials to MLflow; print phases and trials on stderr.

    Returns:
        What ``autoprec search --json`` prints, as an object that notebooks and terminals show as a table;
        ``autoprec.load(result.policy)`` is the policy, ``result.study`` the Optuna study, ``result.to_pandas()`` its
        trials.

    Raises:
        UsageError: an option, a script or a function that cannot be meant; the message says what can.
        AutoPrecError: see docs/exit-codes.md.
    """
    asked = dict(locals())  # every keyword by its name; tests hold them to the fields of SearchOptions
    for name in ("script", "progress"):
        del asked[name]
    return _run(script, asked, progress=progress)


def _run(
    script: str | os.PathLike[str] | Sequence[str] | Callable[[], Any],
    asked: dict[str, Any],
    *,
    progress: bool,
) -> SearchResult:
    from autoprec.trial.command import ScriptCommand
    from autoprec.tuning.engine import Search
    from autoprec.tuning.events import Listener, Listeners
    from autoprec.tuning.options import SearchOptions

    began = time.monotonic()
    checked = _checked(asked)
    options = SearchOptions(command=_tokens(script, Path(checked["runs_dir"])), **checked)
    command = ScriptCommand.parse(options.command)
    listeners: list[Listener] = []
    with contextlib.ExitStack() as stack:
        if progress:
            from autoprec.cli.progress import TerminalProgress

            terminal = TerminalProgress()
            stack.callback(terminal.close)
            listeners.append(terminal)
        if not options.track:
            engine = Search(options, command, Listeners(*listeners), started=began)
            return SearchResult.of(engine.run(), options.storage)
        from autoprec.tracking.listener import TrackingListener

        tracker = TrackingListener(options.runs_dir)
        stack.callback(tracker.close)
        engine = Search(options, command, Listeners(*listeners, tracker), started=began)
        return SearchResult.of(engine.timed(tracker.attach(engine.run(), engine.study_dir)), options.storage)


def _tokens(script: Any, runs_dir: Path) -> tuple[str, ...]:
    """Return the command line of a script, or of the one that a function is written as.

    Raises:
        UsageError: it is neither.
    """
    if isinstance(script, str):
        return tuple(shlex.split(script))
    if isinstance(script, os.PathLike):
        return (os.fspath(script),)
    if isinstance(script, Sequence) and all(isinstance(word, (str, os.PathLike)) for word in script):
        return tuple(map(os.fspath, script))
    from autoprec.trial.function_script import function_script

    return (str(function_script(script, runs_dir / "functions")),)


#: What a Python type accepts, by the first word of an option's annotation.
_KINDS: dict[str, tuple[type, ...]] = {"str": (str,), "int": (int,), "float": (int, float), "bool": (bool,)}
_UNITS = {
    "budget_s": "seconds: 1200 for 20 minutes",
    "max_memory": "bytes: 60 * 2**30 for 60 GiB",
    "max_divergence": "a fraction: 0.0025 for 0.25 %",
}


def _checked(asked: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options, paths as text; refuse those of a wrong type, which the command line would have parsed.

    Raises:
        UsageError: naming the option, what it was given and what it takes.
    """
    from autoprec.tuning.options import SearchOptions

    out: dict[str, Any] = {}
    for option in (one for one in fields(SearchOptions) if one.name in asked):
        kind, _, optional = str(option.type).partition(" | ")
        value = asked[option.name]
        value = os.fspath(value) if kind == "str" and isinstance(value, os.PathLike) else value
        right = isinstance(value, _KINDS[kind]) and (kind == "bool" or not isinstance(value, bool))
        if not right and not (optional and value is None):
            takes = {"str": "text", "int": "a whole number", "float": "a number", "bool": "True or False"}[kind]
            raise UsageError(
                f"{option.name}={value!r} is a {type(value).__name__}, where {takes} is needed",
                fix=f"it is in {_UNITS[option.name]}"
                if option.name in _UNITS
                else f"e.g. {option.name}={option.default!r}",
            )
        out[option.name] = value
    return out
