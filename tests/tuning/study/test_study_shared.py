"""The study in a real PostgreSQL server, as several machines would share it."""

from __future__ import annotations

import importlib.util
import os
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

import optuna
import pytest

from autoprec.errors import StudyError
from autoprec.tuning.options import SearchOptions
from autoprec.tuning.study.run import Run, metrics_of
from autoprec.tuning.study.study import StudyStore, without_password

missing = [name for name in ("pgserver", "psycopg2") if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(missing), reason=f"needs a PostgreSQL server: pip install {' '.join(missing)}"),
]
SPACE = {f"layer:{i}": optuna.distributions.CategoricalDistribution(("keep", "bf16")) for i in range(6)}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import pgserver

        # not tmp_path: a server that is started by root runs as another user, who cannot enter pytest's folders
        server = pgserver.get_server(Path(tempfile.mkdtemp(prefix="autoprec-postgres-")), cleanup_mode="delete")
    yield server.get_uri().replace("postgresql://", "postgresql+psycopg2://")
    server.cleanup()


def test_a_search_is_resumed_from_postgres(url: str) -> None:
    first = StudyStore(url, "shared", ("step_time_ms", "divergence"), resume=False)
    first.start(optuna.samplers.RandomSampler(seed=0), SPACE, [])
    for number in range(4):
        trial = first.ask()
        metrics = {"step_time_ms": 1.0, "divergence": 0.1}
        first.tell(trial, Run(number, "search", "t", dict(trial.params), {}, "ok", metrics=metrics_of(metrics)))
    with pytest.raises(StudyError, match=f"in use by pid {os.getpid()}"):
        StudyStore(url, "shared", ("step_time_ms", "divergence"), resume=True)
    first.close()
    second = StudyStore(url, "shared", ("step_time_ms", "divergence"), resume=True)
    assert [r.params for r in second.learned()] == [r.params for r in first.learned()]
    second.close()
    with pytest.raises(StudyError, match="exists already"):
        StudyStore(url, "shared", ("step_time_ms", "divergence"), resume=False)


def test_a_server_that_is_down_is_a_study_error_with_the_address(url: str) -> None:
    with pytest.raises(StudyError, match="cannot be used"):
        StudyStore("postgresql+psycopg2://localhost:1/none", "x", ("a", "b"), resume=False)


def test_passwords_are_never_shown() -> None:
    assert "secret" not in without_password("postgresql+psycopg2://me:secret@db/x")
    options = SearchOptions(command=("train.py",), study="s", storage="postgresql://me:secret@db/x")
    assert "secret" not in options.resume_command()
