"""A study's records, read by something beside the search that writes them."""

from __future__ import annotations

import contextlib
import functools
import json
import sqlite3
from pathlib import Path

from autoprec.errors import StudyError
from autoprec.tuning.study.run import Run
from autoprec.tuning.study.sqlite_check import check_sqlite, opened
from autoprec.tuning.study.storage import open_storage, root_cause, sqlite_file, without_password


def stored_records(url: str, name: str) -> list[Run]:
    """Return the finished runs of a study in their order; none where there is no such study (yet). Writes nothing.

    Raises:
        StudyError: the storage cannot be read, or a record is damaged.
    """
    path = sqlite_file(url)
    if path is not None and not (path.is_file() and path.stat().st_size):
        return []
    if path is not None:
        _check_once(url, path.stat().st_dev, path.stat().st_ino)
    try:
        if path is not None and not _is_made(path, name):
            return []
        storage = open_storage(url)
        with contextlib.closing(contextlib.ExitStack()) as stack:
            stack.callback(storage.engine.dispose)
            study = next((s for s in storage.get_all_studies() if s.study_name == name), None)
            trials = storage.get_all_trials(study._study_id, deepcopy=False) if study is not None else []
            stored = [trial.user_attrs for trial in trials]
    except Exception as error:
        what = f"the study's storage cannot be read: {root_cause(error)}"
        raise StudyError(what, where=without_password(url), fix="is its server running?") from error
    where = f"{without_password(url)}, study {name}"
    return [Run.from_stored(one, where=where) for one in stored if isinstance(one.get("record"), dict)]


def script_of(path: Path, name: str) -> str | None:
    """Return the script and its arguments that a study was started with; None where that is not known.

    Args:
        path: of a SQLite file.
        name: of the study in it.
    """
    asked = (
        "select value_json from study_user_attributes join studies using (study_id) where study_name = ? and key = ?"
    )
    with contextlib.suppress(sqlite3.Error, ValueError, TypeError, KeyError), opened(path, "ro") as connection:
        return str(json.loads(connection.execute(asked, (name, "signature")).fetchone()[0])["script"])
    return None


@functools.lru_cache(maxsize=64)
def _check_once(url: str, _device: int, _inode: int) -> None:
    """Look through a file whole once in this process: whoever follows a search reads every few seconds.

    What becomes of the file after that is found where it is read: SQLite's own errors, checksums of the records.
    """
    check_sqlite(url, holds_studies=True)


def _is_made(path: Path, name: str) -> bool:
    """Say whether a SQLite file holds a study of this name, without making the tables that it lacks.

    Optuna makes a study after all of its tables; a storage that is opened in between makes the rest of them, beside
    the search that is at it.
    """
    try:
        with opened(path, "ro") as connection:
            found = connection.execute("select 1 from studies where study_name = ?", (name,)).fetchone()
    except sqlite3.OperationalError as error:
        if "no such table" in str(error):
            return False
        raise
    return found is not None
