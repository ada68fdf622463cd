"""What a server missed is sent later, and sending twice changes nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from autoprec.support.files import file_lock
from autoprec.tracking import replay
from autoprec.tracking.replay import sync
from autoprec.tracking.spool import Spool
from tests.tracking.conftest import tracked_runs

pytestmark = pytest.mark.filterwarnings("ignore")


def test_replaying_from_nothing_changes_nothing(tracked: dict[str, Any]) -> None:
    before = {run.info.run_id: (run.data.metrics, run.data.tags) for run in tracked_runs(tracked)}
    for state in (tracked["runs"] / "demo" / "tracking").glob("state-*.json"):
        state.unlink()
    (report,) = sync(tracked["runs"])
    assert report.ok
    assert report.sent > len(tracked["records"])
    assert {run.info.run_id: (run.data.metrics, run.data.tags) for run in tracked_runs(tracked)} == before
    points = tracked["client"].get_metric_history(
        tracked_runs(tracked, "tags.`autoprec.number` = '4'")[0].info.run_id, "loss"
    )
    assert len(points) == 10
    (again,) = sync(tracked["runs"])
    assert (again.ok, again.sent) == (True, 0)


def test_where_nothing_was_tracked_there_is_nothing_to_send(tmp_path: Path) -> None:
    assert sync(tmp_path) == []


@pytest.mark.parametrize("address", ["http://evil.example", "https://a@evil", "databricks://x", "postgresql://evil/x"])
def test_a_server_is_never_taken_from_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    """Somebody else's folder must not choose who is sent the user's MLFLOW_TRACKING_TOKEN."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setattr(replay, "drain", lambda *_args, **_more: pytest.fail("asked the folder's server"))
    Spool.of(tmp_path / "s").append("open", tracking_uri=address, experiment="e", study="s")
    (found,) = sync(tmp_path)
    assert (found.ok, found.sent) == (False, 0)
    assert "MLFLOW_TRACKING_URI" in found.reason


def test_a_store_whose_login_was_not_written_down_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    Spool.of(tmp_path / "s").append("open", tracking_uri="http://[hidden]@host", experiment="e", study="s")
    told = []
    (found,) = sync(tmp_path, report=told.append)
    assert told == [found]
    assert (found.study, found.ok, found.sent) == ("s", False, 0)
    assert "--tracking-uri" in found.reason


def test_a_study_that_is_being_sent_is_waited_for_and_then_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spool = Spool.of(tmp_path / "s")
    spool.append("open", tracking_uri="", experiment="e", study="s")
    monkeypatch.setattr(replay, "_PATIENCE_S", 0.3)
    with file_lock(spool.directory / "drain.lock", what="study's tracking"):
        (found,) = sync(tmp_path / "s", tracking_uri="http://127.0.0.1:9")
    assert not found.ok
    assert found.reason.startswith("still being sent: ")


def test_a_server_that_is_still_gone_keeps_everything(tmp_path: Path) -> None:
    spool = Spool.of(tmp_path / "s")
    spool.append("study", info={})
    (found,) = sync(tmp_path, tracking_uri="http://127.0.0.1:9", experiment="e")
    assert not found.ok
    assert "does not answer" in found.reason
    assert spool.load_state("http://127.0.0.1:9").offset == 0
