"""A SQLite file is looked at before anything creates tables in it."""

import functools
import sqlite3
from pathlib import Path

import pytest

from autoprec.errors import StudyError
from autoprec.tuning.study.sqlite_check import check_sqlite
from autoprec.tuning.study.study import StudyStore


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "a b.db"
    connection = sqlite3.connect(path)
    connection.executescript(
        "create table a (id integer primary key); create table b (a integer references a(id), text);"
        "insert into a values (1);"
    )
    connection.executemany("insert into b values (1, ?)", [("x" * 500,)] * 200)
    connection.commit()
    connection.close()
    return path


def test_an_intact_file_and_what_is_no_file_pass(path: Path) -> None:
    before = path.read_bytes()
    check_sqlite(f"sqlite:///{path}")
    check_sqlite(f"sqlite:///{path.parent / 'nowhere.db'}")
    check_sqlite("sqlite://")
    check_sqlite("postgresql://user@host/db")
    assert path.read_bytes() == before
    assert [p.name for p in path.parent.iterdir()] == ["a b.db"]


@pytest.mark.parametrize("share", [0, 0.001, 0.3, 0.5, 0.99])
def test_a_truncated_file_is_refused_and_left_as_it_is(path: Path, share: float) -> None:
    whole = path.read_bytes()
    cut = whole[: int(len(whole) * share) or 1]
    path.write_bytes(cut)
    with pytest.raises(StudyError, match="damaged or truncated") as caught:
        check_sqlite(f"sqlite:///{path}")
    assert caught.value.exit_code == 5
    assert path.read_bytes() == cut


def test_a_row_that_belongs_to_nothing_is_damage(path: Path) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute("update a set id = 2")
    connection.close()
    with pytest.raises(StudyError, match="a row of b belongs to nothing"):
        check_sqlite(f"sqlite:///{path}")


def test_a_file_in_use_is_for_others_to_report(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    connection = sqlite3.connect(path)
    monkeypatch.setattr(sqlite3, "connect", functools.partial(sqlite3.connect, timeout=0.1))  # SQLite waits 5 s
    connection.execute("begin exclusive")
    check_sqlite(f"sqlite:///{path}")
    connection.close()


def test_an_empty_file_is_a_study_that_was_not_begun_or_was_truncated(path: Path) -> None:
    path.write_bytes(b"")
    check_sqlite(f"sqlite:///{path}")
    with pytest.raises(StudyError, match="it is empty"):
        check_sqlite(f"sqlite:///{path}", may_be_empty=False)


def test_the_database_of_another_program_is_not_resumed_and_stays_as_it_is(path: Path) -> None:
    before = path.read_bytes()
    with pytest.raises(StudyError, match="another program"):
        StudyStore(f"sqlite:///{path}", "any", ("step_time_ms",), resume=True)
    assert path.read_bytes() == before
