"""What tracking keeps in a study's folder."""

from __future__ import annotations

import json
from pathlib import Path

from autoprec.tracking.folder import About, State, TrackedFolder
from autoprec.tuning.study.records import SearchResult
from autoprec.tuning.study.run import Run
from tests.tracking.conftest import make_study


def test_what_is_kept_is_read_back(tmp_path: Path, records: list[Run], result: SearchResult) -> None:
    folder = make_study(tmp_path / "s", records, result, experiment="e", info={"lr": 1.0})
    again = TrackedFolder(tmp_path / "s")
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
    assert [(path.name, path.read_text()) for path in folder.files()] == [("policy.yaml", "first")]


def test_news_grow_with_whatever_there_is_to_log(tmp_path: Path) -> None:
    folder = TrackedFolder(tmp_path)
    assert folder.news == 0
    seen = []
    for _ in range(3):
        folder.save_about(About("s"))
        seen.append(folder.news)
    assert seen == sorted(set(seen))


def test_the_state_of_another_store_says_nothing_and_damage_neither(tmp_path: Path) -> None:
    folder = make_study(tmp_path / "s")
    folder.save_state(State("http://a", "1", "r", 3))
    assert folder.state("http://a").news == 3
    assert folder.state("http://b") == State()
    (folder.own / "state.json").write_text("{")
    assert folder.state("http://a") == State()
    (folder.own / "study.json").write_text("[")
    assert folder.about().study == "s"


def test_a_study_of_an_earlier_version_is_read_from_its_event_log(tmp_path: Path, result: SearchResult) -> None:
    folder = TrackedFolder(tmp_path / "s")
    uid = folder.uid
    events = [
        {"kind": "open", "tracking_uri": "", "experiment": "mine", "study": "demo"},
        {"kind": "study", "info": {"steps": 8}, "time": 5.0},
        {"kind": "end", "status": "FINISHED"},
    ]
    (folder.own / "spool.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events) + "{torn")
    (folder.path / "result.json").write_text(json.dumps(result.to_json()))
    about = TrackedFolder(tmp_path / "s").about()
    assert (about.study, about.experiment, about.info) == ("demo", "mine", {"steps": 8})
    assert (about.started, about.ended, folder.uid) == (5.0, "FINISHED", uid)
    outcome = folder.outcome()
    assert outcome is not None
    assert outcome[0].verdict == "adopt"
