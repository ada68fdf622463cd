"""What a trial tells at its end."""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path

import pytest

from autoprec.errors import AutoPrecWarning, PolicyError, PolicyMismatchError, UnsupportedError
from autoprec.trial.inside.reporting import ending
from autoprec.trial.inside.reporting.ending import note_warnings, status_of, wait_and_exit, write_result
from autoprec.trial.losses import Series
from autoprec.trial.protocol import GemmFindings, TrialResult


def test_statuses() -> None:
    assert status_of(PolicyMismatchError("x")) == "mismatch"
    assert status_of(PolicyError("x")) == "mismatch"
    assert status_of(UnsupportedError("x")) == "unsupported"
    assert status_of(KeyError("x")) == "crashed"


def test_results_survive_what_json_cannot_say(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    row = {"x": float("inf"), "y": (1, {"z": 2.0})}
    result = TrialResult("diverged", losses=(1.0, float("nan")), answer=GemmFindings(ok=True, gemms=(row,)))
    write_result(path, result)
    document = json.loads(path.read_text())
    assert document["losses"] == [1.0, None]
    assert document["answer"]["gemms"] == [{"x": None, "y": [1, {"z": 2.0}]}]
    assert TrialResult.from_json(document).status == "diverged"
    assert list(tmp_path.iterdir()) == [path]


def test_what_autoprec_warns_of_is_kept_once_and_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []
    monkeypatch.setattr(warnings, "showwarning", lambda message, *_: shown.append(str(message)))
    into: dict[str, None] = {}
    note_warnings(into)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        for text in ("b", "a", "b"):
            warnings.warn(text, AutoPrecWarning, stacklevel=1)
        warnings.warn("of the script", UserWarning, stacklevel=1)
    assert list(into) == ["b", "a"]
    assert shown == ["b", "a", "b", "of the script"]


def test_a_metric_that_is_not_finite_survives_json(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    series = Series("f1", higher=True, steps=(1, 2), values=(float("nan"), 0.5), names=("f1", "loss"))
    write_result(path, TrialResult("ok", metric=series))
    read = TrialResult.from_json(json.loads(path.read_text()))
    assert read.metric is not None
    assert str(read.metric.values) == "(nan, 0.5)"
    assert read.metric.names == ("f1", "loss")
    assert read.curve[1] == -0.5


def test_a_rank_waits_for_the_result_of_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, looks = tmp_path / "result.json", []

    def sleep(_: float) -> None:
        looks.append(path.exists())
        path.touch()

    def end(code: int) -> None:
        raise SystemExit(code)

    monkeypatch.setattr(ending.time, "sleep", sleep)
    monkeypatch.setattr(os, "_exit", end)
    with pytest.raises(SystemExit):
        wait_and_exit(path)
    assert looks == [False]
