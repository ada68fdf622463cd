"""A study's records, read beside the search that writes them."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path

import pytest

from autoprec.errors import StudyError
from autoprec.tuning.study.reading import script_of, stored_records
from autoprec.tuning.study.study import StudyStore, default_storage
from tests.tracking.conftest import make_records


def test_records_are_read_while_their_search_holds_the_study(tmp_path: Path) -> None:
    url = default_storage(tmp_path)
    assert stored_records(url, "s") == []
    assert not (tmp_path / "study.db").exists(), "reading makes no database"
    store = StudyStore(url, "s", ("step_time_ms", "divergence"), resume=False)
    assert stored_records(url, "s") == []
    for record in make_records():
        store.add(record)
    found = stored_records(url, "s")
    assert [(record.name, record.metrics, record.losses) for record in found] == [
        (record.name, record.metrics, record.losses) for record in make_records()
    ]
    assert stored_records(url, "another") == []
    store.close()


def test_a_file_is_looked_through_once_however_often_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked: list[str] = []
    monkeypatch.setattr("autoprec.tuning.study.reading.check_sqlite", lambda url, **_named: checked.append(url))
    url = default_storage(tmp_path)
    for _ in (1, 2):
        StudyStore(url, "s", ("step_time_ms", "divergence"), resume=False).close()
        for _poll in (1, 2, 3):
            assert stored_records(url, "s") == []
        (tmp_path / "study.db").rename(tmp_path / "moved.db")  # another file takes its place
    assert checked == [url, url]


def test_a_damaged_database_is_named(tmp_path: Path) -> None:
    (tmp_path / "study.db").write_bytes(b"x" * 5000)
    with pytest.raises(StudyError):
        stored_records(default_storage(tmp_path), "s")


def test_the_script_of_a_study_is_read_where_it_is_known(tmp_path: Path) -> None:
    path = tmp_path / "study.db"
    assert script_of(path, "s") is None
    assert not path.exists(), "reading makes no database"
    store = StudyStore(default_storage(tmp_path), "s", ("step_time_ms",), resume=False)
    assert script_of(path, "s") is None, "it is not signed yet"
    store.set_signature({"script": "train.py --lr '1 2'"})
    assert script_of(path, "s") == "train.py --lr '1 2'"
    assert script_of(path, "another") is None
    store.close()
    path.write_bytes(b"x" * 5000)
    assert script_of(path, "s") is None


def test_a_database_that_is_being_made_is_left_to_what_makes_it(tmp_path: Path) -> None:
    """Optuna makes its tables one after another: a reader that makes the others ends the search with a conflict."""
    path = tmp_path / "study.db"
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("create table studies (study_id integer primary key, study_name text)")
        connection.commit()
    before = path.read_bytes()
    assert stored_records(default_storage(tmp_path), "s") == []
    assert path.read_bytes() == before
