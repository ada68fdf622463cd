"""The listener forwards a search's events and never raises."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autoprec.tracking.listener import TrackingListener
from autoprec.tracking.notes import parent_params
from autoprec.tracking.spool import Spool
from autoprec.tuning.events import SearchInfo
from autoprec.tuning.study.records import SearchResult
from autoprec.tuning.study.run import Run

INFO = SearchInfo("demo", "", "sqlite://", "train.py", "cpu", "measured", "fork", "cpu", {}, {}, 3, "autoprec search")


def _events(directory: Path) -> list[dict[str, Any]]:
    return [event for event, _ in Spool.of(directory).read()]


@pytest.fixture
def no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autoprec.tracking.tracker.Tracker._start", lambda self: None)


def _started(tmp_path: Path) -> TrackingListener:
    listener = TrackingListener(tmp_path)
    listener.started(replace(INFO, study_dir=str(tmp_path / "demo")))
    return listener


@pytest.mark.usefixtures("no_process")
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
    (info,) = [event["info"] for event in _events(tmp_path / "demo") if event["kind"] == "study"]
    params = parent_params(info)
    assert {key: params[key] for key in ("steps", "seed", "budget_s", "force", "git_commit")} == {
        **{"steps": "20", "seed": "3", "budget_s": "1200.0", "force": "False"},
        "git_commit": "of /there",
    }
    assert params["version.autoprec"]
    assert params["trials"] == "3", "what the search was given, resumed or not"
    assert not {"max_memory", "space", "folder", "options"} & set(params)


@pytest.mark.usefixtures("no_process")
def test_events_are_spooled_and_the_front_is_tagged_at_the_end(
    tmp_path: Path, records: list[Run], result: SearchResult
) -> None:
    listener = _started(tmp_path)
    result = replace(result, best={**result.best, "name": "search 5"})
    for record in records:
        listener.trial(record, 1, 3, None, 0.0)
    (tmp_path / "demo" / "report.html").write_text("x", encoding="utf-8")
    attached = listener.attach(result, tmp_path / "demo")
    listener.close(0)
    assert attached.mlflow["run_id"] is None
    events = _events(tmp_path / "demo")
    kinds = [event["kind"] for event in events]
    assert kinds[:2] == ["open", "study"]
    assert kinds[-3:] == ["finished", "artifacts", "end"]
    late = [e["record"] for e in events[2 + len(records) :] if e["kind"] == "trial"]
    assert {(r["name"], tuple(r["tags"])) for r in late} == {("search 5", ("best",))}
    assert events[-1]["status"] == "FINISHED"


def test_what_was_rejected_is_not_on_the_front(records: list[Run], result: SearchResult) -> None:
    """A row that says `infeasible` and `pareto` at once offers what must not be taken."""
    own = replace(result, front=({"name": "search 4"}, {"name": "search 5"}), rejected={"search 4": "beyond 0.250%"})
    marked = {record.name: set(record.tags) for record in TrackingListener._marked(records, own)}
    assert "pareto" in marked["search 5"]
    assert marked["search 4"] & {"pareto", "infeasible"} == {"infeasible"}


@pytest.mark.usefixtures("no_process")
def test_after_a_resume_only_the_new_answer_is_the_best(
    tmp_path: Path, records: list[Run], result: SearchResult
) -> None:
    for best in ("search 4", "search 5"):
        listener = _started(tmp_path)
        for record in records if best == "search 4" else ():
            listener.trial(record, 1, 3, None, 0.0)
        listener.attach(replace(result, best={**result.best, "name": best}), tmp_path / "demo")
        listener.close(0)
    latest = {e["record"]["number"]: e["record"] for e in _events(tmp_path / "demo") if e["kind"] == "trial"}
    assert [r["name"] for r in latest.values() if "best" in r["tags"]] == ["search 5"]


@pytest.mark.usefixtures("no_process")
def test_charts_show_the_runs_of_earlier_sessions_as_well(
    tmp_path: Path, records: list[Run], result: SearchResult
) -> None:
    charts = []
    for told in (records, [record for record in records if record.ok and record.kind == "search"][:1]):
        listener = _started(tmp_path)
        for record in told:
            listener.trial(record, 1, 3, None, 0.0)
        listener.attach(result, tmp_path / "demo")
        listener.close(0)
        charts.append((tmp_path / "demo" / "charts" / "pareto.svg").read_text())
    assert charts[0] == charts[1]


@pytest.mark.usefixtures("no_process")
def test_a_search_that_did_not_finish_is_killed(tmp_path: Path) -> None:
    listener = _started(tmp_path)
    listener.close(0)
    assert _events(tmp_path / "demo")[-1]["status"] == "KILLED"


def test_a_listener_that_was_never_started_does_nothing(tmp_path: Path, result: SearchResult) -> None:
    listener = TrackingListener(tmp_path)
    assert listener.attach(result, tmp_path) is result
    listener.close()
