"""What is waited for and what is not (a real server that dies: tests/faults/test_database_away.py)."""

from __future__ import annotations

from pathlib import Path

import pytest
import sqlalchemy
from sqlalchemy.exc import OperationalError

from autoprec.tuning.study.storage import is_server, patiently, root_cause, sqlite_file, without_password

SERVER = "postgresql+psycopg2://me:secret@db/x"


def outage() -> OperationalError:
    return OperationalError("insert", {}, ConnectionError("server closed the connection"))


def test_a_server_that_is_back_is_told_about_twice() -> None:
    answers: list[BaseException | int] = [outage(), outage(), 7]
    said: list[str] = []

    def act() -> int:
        answer = answers.pop(0)
        if isinstance(answer, BaseException):
            raise answer
        return answer

    assert patiently(act, SERVER, said.append) == 7
    assert len(said) == 2
    assert "5 min" in said[0]


def test_patience_ends_and_a_refused_statement_is_not_waited_for() -> None:
    def away() -> None:
        raise outage()

    said: list[str] = []
    with pytest.raises(OperationalError):
        patiently(away, SERVER, said.append, patience_s=0.3)
    assert len(said) == 1

    def wrong() -> None:
        raise ValueError("not in the space")

    with pytest.raises(ValueError, match="not in the space"):
        patiently(wrong, SERVER, said.append)
    with pytest.raises(OperationalError):  # a file does not come back by itself
        patiently(away, "sqlite:///x.db", said.append)
    assert len(said) == 1


def test_addresses() -> None:
    assert is_server(SERVER)
    assert not is_server("sqlite:///x.db")
    assert not is_server("nonsense")
    assert sqlite_file("sqlite:////data/x.db") == Path("/data/x.db")
    assert sqlite_file("sqlite://") is sqlite_file(SERVER) is sqlite_file("") is None
    assert "secret" not in without_password(SERVER)
    assert without_password("postgresql://db/x?user=me&password=secret") == "postgresql://db/x?password=***&user=me"


def test_the_driver_of_the_database_has_the_last_word(tmp_path: Path) -> None:
    engine = sqlalchemy.create_engine(f"sqlite:///{tmp_path}/nowhere/x.db")
    with pytest.raises(OperationalError) as error:
        engine.connect()
    assert root_cause(error.value) == "OperationalError: unable to open database file"
