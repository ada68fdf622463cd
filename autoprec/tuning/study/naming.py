"""Names of studies: from the script, with a number where the name is taken, or mistyped in a search that resumes."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from pathlib import Path

from autoprec.errors import StudyError, nearest
from autoprec.trial.command import ScriptCommand
from autoprec.tuning.options import RUNS, SearchOptions
from autoprec.tuning.study.reading import script_of

#: Names that look like the one that was typed and are looked at.
_NEAR = 5


def free_name(options: SearchOptions, command: ScriptCommand, held: Collection[str] = ()) -> str:
    """Return the study's name: ``train_gpt``, ``train_gpt-2``, ...; with ``--resume`` the latest of the script, if any.

    Args:
        options: where studies lie, and for which target this one is.
        held: names that other searches have begun on and not yet written to.
    """
    words = command.label.split()  # "torchrun train.py" is a study of train
    stem = Path(words[0] if command.kind == "script" else words[-1]).name.removesuffix(".py")
    stem = re.sub(r"[^A-Za-z0-9_.-]+", "-", stem).strip("-.") or "study"
    if options.target not in ("auto", "cpu"):
        stem += f"-{re.sub(r'[^A-Za-z0-9_.-]+', '-', options.target)}"
    runs = Path(RUNS)
    if options.resume:
        numbered = re.compile(re.escape(stem) + r"(-\d+)?")
        existing = [p for p in runs.glob(f"{stem}*/study.db") if numbered.fullmatch(p.parent.name)]
        if existing:
            return max(existing, key=lambda p: p.stat().st_mtime).parent.name
    index, name = 1, stem
    while name in held or (runs / name / "study.db").exists():
        index += 1
        name = f"{stem}-{index}"
    return name


def check_named(options: SearchOptions) -> None:
    """Refuse to resume a study that is not there and was not just about to begin, before a folder is made for it.

    A job script that is started again when it was ended always gives the same command: its first start, and one that
    was ended before the study was written, begin the study.

    Raises:
        StudyError: its database is gone, or the name is mistyped (:func:`check_mistyped`).
    """
    runs = Path(RUNS)
    if not options.resume or not options.study or options.storage or (runs / options.study / "study.db").exists():
        return
    if not may_begin(runs / options.study):
        raise StudyError(
            f"the database of study '{options.study}' is gone",
            where=str(runs / options.study / "study.db"),
            fix="put it back, or start a new study with --study NEW",
        )
    if not (runs / options.study).exists():
        there = sorted(path.parent.name for path in runs.glob("*/study.db"))

        def script_of_other(name: str) -> str | None:
            return script_of(runs / name / "study.db", name)

        check_mistyped(options.study, there, script_of_other, options.script_text(), str(runs))


def may_begin(folder: Path) -> bool:
    """Say whether a study that is to be resumed and is not there may begin: it was never written.

    The recorded step is written after the study: beside it, a database without a study has lost one.

    Args:
        folder: of the study's files.
    """
    return not (folder / "graph.json").exists()


def check_mistyped(
    name: str, there: Collection[str], script_of: Callable[[str], str | None], script: str, where: str
) -> None:
    """Refuse to begin a study whose name is most likely mistyped: one of a like name is of the same script.

    Studies of a like name and other arguments are those of other jobs.

    Args:
        name: of the study that is to be resumed and is not there.
        there: names of those that are.
        script_of: returns the script and its arguments that a study is of; None where that is not known.
        script: those of this search.
        where: the studies lie, for the message.

    Raises:
        StudyError: naming the studies that exist.
    """
    for close in nearest(name, there, _NEAR):
        if script_of(close) in (None, script):
            what = f"no study named '{name}' was found to resume"
            hint = (
                f"did you mean '{close}'? there are: {', '.join(sorted(there)[:10])}; for a new one leave out --resume"
            )
            raise StudyError(what, where=where, fix=hint)


def is_numbered(name: str) -> bool:
    """Say whether a free name got its number because the plain one is taken."""
    plain, _, number = name.rpartition("-")
    return number.isdigit() and (Path(RUNS) / plain / "study.db").exists()
