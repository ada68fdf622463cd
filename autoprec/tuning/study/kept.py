"""What a search knows and its study does not hold yet, kept as soon as it is known: one that is killed goes on there.

The recorded step, the runs of the reference and the gradient errors are answers of trials that the study does not hold;
duels, and runs under a further seed, it holds when all that belongs to them has ended. Each is a file under a key of
all that it depends on: what was asked, of which sources and arguments, by which versions, on which machine. What
belongs to another key is never found, and so answers no question of this search.
"""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from autoprec._version import __version__
from autoprec.cost.device.cpu import cpu_model
from autoprec.errors import FileError
from autoprec.precision.hardware import cores
from autoprec.support.files import checksum, finite, read_document, with_checksum, without_checksum, write_json
from autoprec.support.optional import installed_version
from autoprec.support.plain import Document
from autoprec.trial.command import ScriptCommand
from autoprec.trial.intervals import FEWEST
from autoprec.trial.probe_log import read_rounds, read_rows
from autoprec.trial.protocol import (
    DuelRounds,
    DuelSpec,
    GradientErrors,
    HostInfo,
    ProbeResult,
    ScanSpec,
    TrialResult,
    TrialSpec,
)

#: What a spec says of how long its trial may take and of where it writes, which changes no result that is whole.
_ASIDE = ("within_s", "timeout_s", "side_by_side", "stays", "log")
#: Variables that choose kernels, threads or the order of sums begin with these.
_NUMERIC = (
    "OMP_",
    "MKL_",
    "KMP_",
    "OPENBLAS_",
    "DNNL_",
    "ONEDNN_",
    "ATEN_",
    "CUBLAS_",
    "NVIDIA_TF32",
    "PYTHONHASHSEED",
)
#: Share of a duel's seconds that is as good as all of them.
_ENOUGH = 0.8
#: The recorded step of a large model is a document of some megabytes.
_MOST_BYTES = 1 << 28


def origin_of(command: ScriptCommand, sources: Mapping[str, str], info: HostInfo) -> str:
    """Return a digest of what every answer of a script depends on, beside what it was asked.

    Args:
        command: the script and its arguments.
        sources: file -> digest (:func:`autoprec.trial.source.source_digests`).
        info: what its host found: the model, the device, how trials are started.
    """
    versions = {name: installed_version(name) for name in ("torch", "transformer_engine", "torchao")}
    return checksum(
        {
            "sources": dict(sources),
            "arguments": [command.kind, command.target, *command.args],
            "versions": versions | {"autoprec": __version__, "python": platform.python_version()},
            "machine": [cpu_model(), cores(), info.device, info.gpus, info.world_size],
            "environment": {name: value for name, value in os.environ.items() if name.startswith(_NUMERIC)},
            "model": [info.model, info.launch],
        }
    )


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked of a trial, and what an earlier session was answered.

    Attributes:
        spec: what is asked.
        known: the answer, where there is one.
        left: what has to be asked where there is none: a scan leaves out the probes that were answered.
        path: of the file of the answer.
        rows: answers to single probes, by their names.
    """

    spec: TrialSpec
    known: TrialResult | None
    left: TrialSpec
    path: Path
    rows: Mapping[str, ProbeResult] = field(default_factory=dict)

    def finish(self, result: TrialResult) -> TrialResult:
        """Return the answer to the whole question, and keep it if there is one.

        Args:
            result: of what was left to ask.

        Raises:
            NoSpaceError: the disk is full.
        """
        whole = result.ok
        if isinstance(self.spec, ScanSpec) and isinstance(result.answer, GradientErrors):
            rows = {**self.rows, **{row.id: row for row in result.answer.probes}}
            found = tuple(rows[probe.id] for probe in self.spec.probes if probe.id in rows)
            result = replace(result, answer=replace(result.answer, probes=found))
            whole = whole and len(found) == len(self.spec.probes)
        if whole:
            _write(self.path, {"result": result.to_json()})
        return result


class KeptAnswers:
    """Answers by what was asked: the n-th question of one kind has the n-th answer, as the reference is run twice.

    Args:
        folder: where each is a file.
        hosts: the folder under which scans write the answers to single probes.
        origin: see :func:`origin_of`.
    """

    def __init__(self, folder: Path, hosts: Path, origin: str) -> None:
        self._folder, self._hosts, self._origin = folder, hosts, origin
        self._asked, self._lock = Counter[str](), threading.Lock()
        self._duels: list[str] = []

    def question(self, spec: TrialSpec, seed: int = 0) -> Question:
        """Return a question with what is known of its answer.

        Args:
            spec: what is asked.
            seed: the paired seed.
        """
        name = self._next(self._key(spec, seed))
        path = self._folder / f"{name}.json"
        known = _read(path)
        if known is not None or not isinstance(spec, ScanSpec):
            return Question(spec, known, spec, path)
        log = f"part-{name}.jsonl"
        rows = read_rows(sorted(self._hosts.glob(f"**/{log}")))
        # at least one is asked: a scan also says what the batch is like
        probes = tuple(probe for probe in spec.probes if probe.id not in rows) or spec.probes[-1:]
        return Question(spec, None, replace(spec, probes=probes, log=log), path, rows)

    def duel(self, spec: DuelSpec, run: Callable[[TrialSpec], TrialResult]) -> TrialResult:
        """Return a duel with the rounds of one that was killed; it is kept until :meth:`duels_are_stored`.

        Args:
            spec: of the duel, with the seconds that it may take.
            run: runs a trial.

        Raises:
            NoSpaceError: the disk is full.
        """
        name = self._next(self._key(spec, 0))
        self._duels.append(name)
        path, log = self._folder / f"{name}.json", f"part-{name}.jsonl"
        if (known := _read(path)) is not None:
            return known
        rounds, taken = read_rounds(sorted(self._hosts.glob(f"**/{log}")))
        within, left = spec.within_s or 0.0, replace(spec, log=log)
        if rounds:  # blocks are as long as if there had been none
            left = replace(left, within_s=max(0.5 * within, within - taken))
        enough = len(rounds) >= FEWEST and taken >= _ENOUGH * within
        result = TrialResult("ok", answer=DuelRounds()) if enough else run(left)
        if not isinstance(result.answer, DuelRounds):
            return result
        result = replace(result, answer=replace(result.answer, rounds=(*rounds, *result.answer.rounds)))
        _write(path, {"result": result.to_json()})
        return result

    def duels_are_stored(self) -> None:
        """Forget all duels so far: one that is asked again is another one, whose rounds are new."""
        for name in self._duels:
            for file in (self._folder / f"{name}.json", *self._hosts.glob(f"**/part-{name}.jsonl")):
                file.unlink(missing_ok=True)
            self._asked.pop(name.rpartition("-")[0], None)
        self._duels.clear()

    def found(self, question: Document) -> Document | None:
        """Return what an earlier session has found out of something that is no single trial; None for nothing."""
        return _document(self._path_of(question, "json"))

    def keep(self, question: Document, found: Document) -> None:
        """Keep what was found out of something that is no single trial.

        Args:
            question: what was asked; the script, its arguments and so on need not be part of it.
            found: what is given to the next session.

        Raises:
            NoSpaceError: the disk is full.
        """
        _write(self._path_of(question, "json"), found)

    def turns(self, question: Document) -> Path:
        """Return the file for rounds of runs in turns (:mod:`autoprec.trial.probe_log`), removed once they are used."""
        self._folder.mkdir(parents=True, exist_ok=True)
        return self._path_of(question, "jsonl")

    def _path_of(self, question: Document, suffix: str) -> Path:
        return self._folder / f"{checksum({'origin': self._origin, 'asked': finite(question)})}.{suffix}"

    def ask(self, spec: TrialSpec, run: Callable[[TrialSpec], TrialResult]) -> TrialResult:
        """Return the answer to a question under the script's own seed, known or not.

        Args:
            spec: what is asked.
            run: runs a trial.
        """
        question = self.question(spec)
        return question.known or question.finish(run(question.left))

    def clear(self) -> None:
        """Forget all answers: the search has ended, and another one asks anew."""
        shutil.rmtree(self._folder, ignore_errors=True)
        for log in self._hosts.glob("**/part-*.jsonl"):
            with contextlib.suppress(OSError):
                log.unlink()

    def _next(self, key: str) -> str:
        with self._lock:
            self._asked[key] += 1
            return f"{key}-{self._asked[key] - 1}"

    def _key(self, spec: TrialSpec, seed: int) -> str:
        asked = {name: value for name, value in spec.to_json().items() if name not in _ASIDE}
        return checksum({"origin": self._origin, "seed": seed, "asked": finite(asked)})


def _write(path: Path, found: Document) -> None:
    write_json(path, with_checksum(finite(found)), indent=None)


def _document(path: Path) -> Document | None:
    """Return what a file holds; None where there is none, or it is damaged."""
    if not path.exists():
        return None
    try:
        return without_checksum(read_document(path, most_bytes=_MOST_BYTES), where=str(path))
    except (FileError, KeyError, ValueError, TypeError):
        return None


def _read(path: Path) -> TrialResult | None:
    """Return a kept answer; None where there is none, or it is damaged."""
    document = _document(path)
    try:
        return None if document is None else TrialResult.from_json(document["result"])
    except (KeyError, ValueError, TypeError):
        return None
