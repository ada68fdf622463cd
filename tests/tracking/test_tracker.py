"""The search's side of tracking: a dead or silent server costs next to nothing and loses nothing."""

from __future__ import annotations

import socket
import time
from pathlib import Path
from typing import Any

import pytest

from autoprec.tracking import Tracker, sync
from autoprec.tuning.study.records import SearchResult
from autoprec.tuning.study.run import Run
from tests.tracking.conftest import tracked_runs

pytestmark = pytest.mark.filterwarnings("ignore")


def test_the_study_is_written_to_its_end(tracked: dict[str, Any]) -> None:
    state = tracked["state"]
    assert (state.status, state.ended) == ("drained", True)
    assert tracked["reference"]["run_id"] == state.run_id
    assert state.tracking_uri == f"sqlite:///{tracked['runs'] / 'mlflow.db'}"
    children = tracked_runs(tracked, f"tags.`mlflow.parentRunId` = '{state.run_id}'")
    assert len(children) == len(tracked["records"])


def test_no_secret_reaches_the_spool_or_the_store(tracked: dict[str, Any]) -> None:
    for path in [*(tracked["runs"] / "demo").rglob("*"), tracked["runs"] / "mlflow.db"]:
        if path.is_file():
            assert b"s3cret" not in path.read_bytes()
    run = tracked["client"].get_run(tracked["state"].run_id)
    assert run.data.params["script"] == "train.py --api-key [hidden] --lr=1"


def _track(directory: Path, uri: str, records: list[Run], result: SearchResult) -> tuple[float, dict[str, Any]]:
    start = time.monotonic()
    tracker = Tracker.open(directory, study="demo", tracking_uri=uri)
    tracker.study_started({})
    for record in records:
        tracker.trial(record)
    reference = tracker.finished(result)
    tracker.close()
    return time.monotonic() - start, reference


def test_a_dead_server_costs_less_than_two_seconds_and_loses_nothing(
    tmp_path: Path, tracked: dict[str, Any], records: list[Run], result: SearchResult
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    seconds, reference = _track(tmp_path / "study", f"http://127.0.0.1:{port}", records, result)
    assert seconds < 2.0
    assert reference["run_id"] is None
    (failed,) = sync(tmp_path, tracking_uri=f"http://127.0.0.1:{port}")
    assert not failed.ok
    assert "does not answer" in failed.reason
    (sent,) = sync(tmp_path, tracking_uri=tracked["state"].tracking_uri, experiment="replayed")
    assert sent.ok
    found = tracked["client"].search_runs([sent.experiment_id], filter_string="tags.`autoprec.role` = 'trial'")
    assert len(found) == len(records)


def test_a_server_that_accepts_and_never_answers_costs_less_than_two_seconds(
    tmp_path: Path, records: list[Run], result: SearchResult
) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen(8)
        uri = f"http://127.0.0.1:{silent.getsockname()[1]}"
        seconds, _ = _track(tmp_path / "study", uri, records, result)
    assert seconds < 2.0
