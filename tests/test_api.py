"""``autoprec.search`` from Python: it hands over to the engine, tells the tracker, and always closes it."""

import functools
import runpy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import autoprec
from autoprec.errors import AutoPrecError, ScriptError
from tests.tracking.conftest import make_records, make_result

RESULT = make_result(make_records())


class FakeEngine:
    """Stands for the engine: keeps what it was given, and ends as the test says."""

    last: "FakeEngine"
    failure: Exception | None = None

    def __init__(self, options: Any, command: Any, listener: Any, started: float) -> None:
        self.options, self.command, self.listener, self.started = options, command, listener, started
        self.study_dir = Path("autoprec-runs/x")
        FakeEngine.last = self

    def run(self) -> Any:
        if self.failure is not None:
            raise self.failure
        return RESULT

    def timed(self, result: Any) -> Any:
        return result


class FakeTracker:
    closed = 0

    def __init__(self, runs_dir: str, *, until: float | None) -> None:
        self.runs_dir = runs_dir

    def attach(self, result: Any, study_dir: Path) -> Any:
        return replace(result, mlflow={"tracked_in": str(study_dir)})

    def close(self) -> None:
        FakeTracker.closed += 1


@pytest.fixture(autouse=True)
def _fakes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    monkeypatch.setattr("autoprec.tracking.listener.Search", FakeEngine)
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
    assert autoprec.search("train.py", track=False).mlflow == {}
    assert FakeTracker.closed == 0
    assert autoprec.search("train.py").mlflow == {"tracked_in": "autoprec-runs/x"}
    assert FakeTracker.closed == 1


def test_the_tracker_is_closed_when_the_search_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeEngine, "failure", ScriptError("it raised"))
    with pytest.raises(ScriptError):
        autoprec.search("train.py")
    assert FakeTracker.closed == 1


def test_a_path_and_paths_among_the_options_are_taken() -> None:
    autoprec.search(Path("train.py"), output=Path("other.yaml"), track=False)  # type: ignore[arg-type]
    assert FakeEngine.last.command.target == "train.py"
    assert FakeEngine.last.options.output == "other.yaml"


def trains(lr: float = 0.1) -> None:
    Path("ran.txt").write_text(f"lr {lr}")


def test_a_function_becomes_a_script_of_its_name(tmp_path: Path) -> None:
    autoprec.search(functools.partial(trains, lr=0.5), track=False)
    command = FakeEngine.last.command
    assert (command.kind, command.label) == ("script", "trains.py")
    assert command.target.startswith("autoprec-runs/functions/")
    runpy.run_path(command.target, run_name="__main__")
    assert Path("ran.txt").read_text() == "lr 0.5"


@pytest.mark.parametrize(
    ("script", "options", "says"),
    [
        (42, {}, "a script or a function that trains, not this int"),
        (dict, {}, "not the class dict"),
        (lambda config: None, {}, "it needs config"),
        ("train.py", {"trials": "3"}, "trials='3' is a str: input should be a valid integer"),
        ("train.py", {"steps": True}, "steps=True is a bool"),
        ("train.py", {"budget_s": "20m"}, "seconds: 1200 for 20 minutes"),
        ("train.py", {"max_memory": "60GiB"}, "bytes: 60"),
        ("train.py", {"max_divergence": 0.25}, "'0.25' without a unit"),
        ("train.py", {"max_divergence": "125%"}, "between 0 and 100"),
        ("train.py", {"objective": "trouhgput"}, "did you mean 'throughput'"),
        ("train.py", {"sampler": "TPE2"}, "unknown sampler"),
    ],
)
def test_a_wrong_argument_is_named_with_what_it_takes(script: Any, options: dict[str, Any], says: str) -> None:
    with pytest.raises(AutoPrecError, match=says):
        autoprec.search(script, track=False, **options)


def test_help_says_what_each_value_of_a_switch_does() -> None:
    """``track: Track nothing. Default: True`` was the opposite of what it does."""
    text = autoprec.search.__doc__ or ""
    assert "track: False: track nothing. Default: True." in text
    assert "resume: Continue a study, or begin it; finished trials are not repeated. Default: False." in text
