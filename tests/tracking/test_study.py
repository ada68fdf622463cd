"""What tracking keeps in a study's folder."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from autoprec.tracking.study import About, TrackedStudy, store_of
from autoprec.tuning.study.records import SearchResult
from autoprec.tuning.study.run import Run
from tests.tracking.conftest import make_study


def test_what_is_kept_is_read_back(tmp_path: Path, records: list[Run], result: SearchResult) -> None:
    folder = make_study(tmp_path / "s", records, result, experiment="e", info={"lr": 1.0})
    again = TrackedStudy(tmp_path / "s")
    assert again.uid == folder.uid
    assert (again.about().experiment, again.about().info) == ("e", {"lr": 1.0})
    assert [record.name for record in again.records()] == [record.name for record in records]
    outcome = again.outcome()
    assert outcome is not None
    assert outcome[0].best == result.best


def test_the_policy_is_copied_since_it_may_be_changed_in_its_place(tmp_path: Path, result: SearchResult) -> None:
    written = tmp_path / "policy.yaml"
    written.write_text("first")
    folder = make_study(tmp_path / "s")
    folder.save_outcome(SearchResult.from_json(result.to_json() | {"policy": str(written)}))
    written.write_text("changed by hand")
    assert [path.read_text() for path in folder.files() if path.name == "policy.yaml"] == ["first"]


def test_a_damaged_note_of_what_was_asked_leaves_the_name(tmp_path: Path) -> None:
    folder = make_study(tmp_path / "s")
    (folder.own / "study.json").write_text("[")
    assert folder.about() == About("s")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"verdict": "adopt"}'])
def test_what_is_not_a_result_is_no_outcome(tmp_path: Path, text: str) -> None:
    folder = make_study(tmp_path / "s")
    (folder.path / "result.json").write_text(text)
    assert folder.outcome() is None


def test_a_resumed_search_that_left_no_new_answer_was_killed(tmp_path: Path, result: SearchResult) -> None:
    folder = make_study(tmp_path / "s", result=result)
    assert [folder.status(running=running) for running in (True, False)] == ["RUNNING", "FINISHED"]
    folder.save_about(About("s", started=time.time() + 60.0))
    assert folder.status(running=False) == "KILLED"


def test_the_store_of_a_folder_is_a_file_or_named_by_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    default = f"sqlite:///{tmp_path / 'mlflow.db'}"
    for recorded, shown in (
        ("", default),
        ("postgresql://evil/x", default),
        ("http://[hidden]@host", default),
        ("http://host:5000", "http://host:5000"),
    ):
        folder = TrackedStudy(tmp_path / "s")
        folder.save_about(About("s", tracking_uri=recorded))
        assert store_of(folder) == shown
    assert store_of(folder, "http://mine") == "http://mine"
