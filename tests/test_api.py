"""``autoprec.search`` from Python: it hands over to the engine, tells the tracker, and always closes it."""

from pathlib import Path
from typing import Any

import pytest

import autoprec
from autoprec.errors import ScriptError


class FakeEngine:
    """Stands for the engine: keeps what it was given, and ends as the test says."""

    last: "FakeEngine"
    failure: Exception | None = None

    def __init__(self, options: Any, command: Any, listener: Any) -> None:
        self.options, self.command, self.listener = options, command, listener
        self.study_dir = Path("autoprec-runs/x")
        FakeEngine.last = self

    def run(self) -> Any:
        if self.failure is not None:
            raise self.failure
        return "result"


class FakeTracker:
    closed = 0

    def __init__(self, runs_dir: str) -> None:
        self.runs_dir = runs_dir

    def attach(self, result: Any, study_dir: Path) -> Any:
        return f"{result} tracked in {study_dir}"

    def close(self) -> None:
        FakeTracker.closed += 1


@pytest.fixture(autouse=True)
def _fakes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    monkeypatch.setattr("autoprec.tuning.engine.Search", FakeEngine)
    monkeypatch.setattr("autoprec.tracking.listener.TrackingListener", FakeTracker)
    monkeypatch.setattr(FakeEngine, "failure", None)
    monkeypatch.setattr(FakeTracker, "closed", 0)


def test_text_and_tokens_mean_the_same() -> None:
    autoprec.search("train.py --name 'a b'", track=False, trials=3)
    assert FakeEngine.last.command.args == ("--name", "a b")
    assert FakeEngine.last.options.trials == 3
    autoprec.search(["train.py", "--name", "a b"], track=False)
    assert FakeEngine.last.command.args == ("--name", "a b")


def test_trials_are_tracked_unless_told_otherwise() -> None:
    assert autoprec.search("train.py", track=False) == "result"
    assert FakeTracker.closed == 0
    assert autoprec.search("train.py") == "result tracked in autoprec-runs/x"
    assert FakeTracker.closed == 1


def test_the_tracker_is_closed_when_the_search_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeEngine, "failure", ScriptError("it raised"))
    with pytest.raises(ScriptError):
        autoprec.search("train.py")
    assert FakeTracker.closed == 1
