"""The listener notes a search's events and never raises; a bad server costs it next to nothing."""

from __future__ import annotations

import socket
import subprocess
import threading
import time
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

import autoprec
from autoprec.tracking.listener import TrackingListener, commit_of, versions
from autoprec.tracking.log import Logged, log_study
from autoprec.tracking.notes import parent_params
from autoprec.tracking.study import TrackedStudy
from autoprec.tuning.events import SearchInfo
from autoprec.tuning.study.records import SearchResult
from autoprec.tuning.study.run import Run
from tests.tracking.conftest import make_study

INFO = SearchInfo("demo", "", "sqlite://", "train.py", "cpu", "measured", "fork", "cpu", {}, {}, 3, "autoprec search")


@pytest.fixture
def no_writer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TrackingListener, "_tell", lambda self: None)


def _started(tmp_path: Path, **named: Any) -> TrackingListener:
    listener = TrackingListener(tmp_path, **named)
    listener.started(replace(INFO, study_dir=str(tmp_path / "demo")))
    return listener


@pytest.mark.usefixtures("no_writer")
def test_the_study_says_what_was_asked_under_which_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autoprec.tracking.listener.commit_of", lambda folder: {"git_commit": f"of {folder}"})
    listener = TrackingListener(tmp_path)
    options = {
        "steps": 20,
        "seed": 3,
        "budget_s": 1200.0,
        "max_memory": None,
        "space": "",
        "trials": 30,
        "force": False,
    }
    listener.started(replace(INFO, study_dir=str(tmp_path / "demo"), options=options, folder="/there"))
    params = parent_params(TrackedStudy(tmp_path / "demo").about().info)
    assert {key: params[key] for key in ("steps", "seed", "budget_s", "force", "git_commit")} == {
        **{"steps": "20", "seed": "3", "budget_s": "1200.0", "force": "False"},
        "git_commit": "of /there",
    }
    assert params["version.autoprec"]
    assert params["trials"] == "3", "what the search was given, resumed or not"
    assert not {"max_memory", "space", "folder", "options"} & set(params)


@pytest.mark.usefixtures("no_writer")
def test_the_environment_names_store_and_experiment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://me:s3cret@127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "mine")
    listener = _started(tmp_path)
    about = TrackedStudy(tmp_path / "demo").about()
    assert (about.tracking_uri, about.experiment) == ("http://[hidden]@127.0.0.1:9", "mine")
    assert listener.reference()["tracking_uri"] == "http://[hidden]@127.0.0.1:9"


@pytest.mark.usefixtures("no_writer")
def test_the_outcome_and_the_end_are_noted(tmp_path: Path, records: list[Run], result: SearchResult) -> None:
    make_study(tmp_path / "demo", records)
    listener = _started(tmp_path)
    folder = TrackedStudy(tmp_path / "demo")
    for record in records:
        listener.trial(record, 1, 3, None, 0.0)
    assert folder.outcome() is None
    assert folder.status(running=False) == "KILLED"
    attached = listener.attach(result, tmp_path / "demo")
    assert attached.mlflow["run_id"] is None
    assert folder.outcome() is not None
    listener.close(0)
    assert folder.status(running=False) == "FINISHED"


def test_a_listener_that_was_never_started_does_nothing(tmp_path: Path, result: SearchResult) -> None:
    listener = TrackingListener(tmp_path)
    assert listener.attach(result, tmp_path) is result
    listener.close()


@pytest.mark.parametrize("answers", [False, True], ids=["dead", "silent"])
def test_a_bad_server_costs_less_than_two_seconds_and_loses_nothing(
    tmp_path: Path, records: list[Run], result: SearchResult, answers: bool
) -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        if answers:
            server.listen(8)
        uri = f"http://127.0.0.1:{server.getsockname()[1]}"
        folder = make_study(tmp_path / "demo", records)
        began = time.monotonic()
        listener = _started(tmp_path, tracking_uri=uri)
        for record in records:
            listener.trial(record, 1, 3, None, 0.0)
        attached = listener.attach(result, tmp_path / "demo")
        listener.close()
        assert time.monotonic() - began < 2.0
    listener._writer.join(30)
    assert attached.mlflow["run_id"] is None
    assert len(folder.records()) == len(records)
    assert not log_study(folder.path, uri).ok


def test_one_thread_writes_what_is_new_and_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[bool, int]] = []
    allowed = threading.Semaphore(0)

    def log_study(path: Path, *_: object, running: bool, **__: object) -> Logged:
        allowed.acquire()
        calls.append((running, threading.get_ident()))
        return Logged("demo", "x", run_id="r")

    monkeypatch.setattr("autoprec.tracking.listener.log_study", log_study)
    make_study(tmp_path / "demo")
    listener = _started(tmp_path)
    for number in range(5):  # none is waited for, and news of several trials are one
        listener.trial(Run(number, "search", "t", {}, {}, "ok"), 1, 3, None, 0.0)
    assert calls == []
    allowed.release(3)
    listener.close(30)
    assert [running for running, _ in calls] in ([True, False], [True, True, False])
    assert {ident for _, ident in calls}.isdisjoint({threading.get_ident()})
    assert listener.reference()["run_id"] == "r"
    assert not listener._writer.is_alive()


def test_a_time_budget_that_is_used_up_leaves_the_rest_to_the_next_command(
    tmp_path: Path, result: SearchResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first write to a new store took up to 20 s beyond a budget of 60 s."""
    allowed = threading.Event()

    def log_study(*_: object, **__: object) -> Logged:
        allowed.wait(60)
        return Logged("demo", "x", run_id="r")

    monkeypatch.setattr("autoprec.tracking.listener.log_study", log_study)
    make_study(tmp_path / "demo")
    began = time.monotonic()
    listener = _started(tmp_path, until=began + 0.5)
    attached = listener.attach(result, tmp_path / "demo")
    listener.close()
    assert time.monotonic() - began < 10.0  # without a budget 20 s
    assert attached.mlflow["pending"] == "autoprec ui --sync"
    allowed.set()
    listener._writer.join(30)


def test_versions_are_those_that_run() -> None:
    found = versions()
    assert found["autoprec"] == autoprec.__version__
    assert found["torch"] == version("torch")
    assert "transformer-engine" not in found


def test_a_commit_and_what_is_not_in_it(tmp_path: Path) -> None:
    def git(*words: str) -> str:
        who = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
        return subprocess.run(["git", "-C", tmp_path, *who, *words], capture_output=True, text=True, check=True).stdout

    assert commit_of(str(tmp_path / "missing")) == {}
    git("init", "-q")
    assert commit_of(str(tmp_path)) == {}, "nothing was committed"
    script = tmp_path / "train.py"
    script.write_text("pass\n")
    git("add", "train.py")
    git("commit", "-qm", "one")
    assert commit_of(str(tmp_path)) == {"git_commit": git("rev-parse", "HEAD").strip(), "git_changes": "none"}
    script.write_text("print()\n")
    assert commit_of(str(tmp_path))["git_changes"] == "uncommitted"
