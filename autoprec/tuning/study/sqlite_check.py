"""Checks that a SQLite file is whole, before anything opens it that would create tables or read half a study."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path
from urllib.parse import quote

from autoprec.errors import StudyError
from autoprec.tuning.study.run import REPAIR
from autoprec.tuning.study.storage import sqlite_file

#: Bytes of the smallest page, and so of the smallest database, that SQLite has.
SMALLEST = 512


def _damaged(why: str, url: str) -> StudyError:
    return StudyError(
        f"the study's database is damaged or truncated: {' '.join(why.split())[:200]}", where=url, fix=REPAIR
    )


def opened(path: Path, mode: str) -> contextlib.closing[sqlite3.Connection]:
    """Open a file that exists, ``ro`` or ``rw``, whatever its folder is called; never makes one."""
    return contextlib.closing(sqlite3.connect(f"file:{quote(str(path.resolve()))}?mode={mode}", uri=True))


def check_sqlite(url: str, *, may_be_empty: bool = True, holds_studies: bool = False) -> None:
    """Check the structure of an existing SQLite database; other URLs, and a file that is not there yet, pass.

    To SQLite an empty file is a database without tables: it is what a crash before the first transaction leaves, and
    what is left of a study that was truncated to nothing (``may_be_empty`` is false where that cannot be the former).

    With ``holds_studies`` a database of another program is refused: opening it as a storage would add tables to it.

    A transaction that a crash left half-written is rolled back, as SQLite does on every opening; nothing else is
    written.

    Args:
        url: the storage's address.
        may_be_empty: see above.
        holds_studies: see above.

    Raises:
        StudyError: it is truncated, damaged, or not a SQLite file.
    """
    path = sqlite_file(url)
    if path is None or not path.is_file():
        return
    size = path.stat().st_size
    if size == 0 and not may_be_empty:
        raise _damaged("it is empty", url)
    if 0 < size < SMALLEST:  # of one byte SQLite makes a new database
        raise _damaged(f"it has {size} bytes", url)
    try:
        with opened(path, "rw") as connection:
            found = [str(row[0]) for row in connection.execute("PRAGMA integrity_check(1)")]
            astray = connection.execute("PRAGMA foreign_key_check").fetchone()
            tables = {str(row[0]) for row in connection.execute("select name from sqlite_master where type = 'table'")}
        why = "" if found == ["ok"] else found[0]
        why = why or (f"a row of {astray[0]} belongs to nothing" if astray is not None else "")
    except sqlite3.DatabaseError as error:
        if "locked" in str(error):  # in use: what follows says by whom
            return
        why = str(error)
    except UnicodeDecodeError:  # SQLite quotes the damaged bytes
        why = "its schema is not text"
    if why:
        raise _damaged(why, url)
    if holds_studies and tables and "studies" not in tables:
        raise StudyError(
            "this is the database of another program: it holds no study to resume",
            where=url,
            fix="is the address right? nothing was changed",
        )
