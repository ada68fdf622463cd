"""Names of studies: from the script, with a number where the name is taken."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path

from autoprec.errors import StudyError, nearest
from autoprec.trial.command import ScriptCommand
from autoprec.tuning.options import RUNS, SearchOptions


def free_name(options: SearchOptions, command: ScriptCommand, held: Collection[str] = ()) -> str:
    """Return the study's name: ``train_gpt``, ``train_gpt-2``, ...; with ``--resume`` the latest one of the script.

    Args:
        options: where studies lie, and for which target this one is.
        held: names that other searches have begun on and not yet written to.

    Raises:
        StudyError: ``--resume``, and the script has no study here.
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
        if not existing:
            raise StudyError(f"no study of {stem} was found to resume", where=str(runs), fix="name it with --study")
        return max(existing, key=lambda p: p.stat().st_mtime).parent.name
    index, name = 1, stem
    while name in held or (runs / name / "study.db").exists():
        index += 1
        name = f"{stem}-{index}"
    return name


def check_named(options: SearchOptions) -> None:
    """Refuse to resume a study of this name that is not there, before a folder is made for it.

    Raises:
        StudyError: there is none; the message names the studies that exist.
    """
    runs = Path(RUNS)
    if not options.resume or not options.study or options.storage or (runs / options.study / "study.db").exists():
        return
    there = sorted(path.parent.name for path in runs.glob("*/study.db"))
    close = nearest(options.study, there) or there[:1]
    hint = f"did you mean '{close[0]}'? there are: {', '.join(there[:10])}" if there else "leave out --resume"
    raise StudyError(f"no study named '{options.study}' was found to resume", where=str(runs), fix=hint)


def is_numbered(name: str) -> bool:
    """Say whether a free name got its number because the plain one is taken."""
    plain, _, number = name.rpartition("-")
    return number.isdigit() and (Path(RUNS) / plain / "study.db").exists()
