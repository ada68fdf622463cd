"""A tracked study is complete in MLflow; a dead or silent server costs next to nothing and loses nothing."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autoprec.tracking import Tracker, sync
from autoprec.tuning.study.records import SearchResult, TrialRecord
from tests.tracking.conftest import make_records, make_result

pytestmark = pytest.mark.filterwarnings("ignore")


def _runs(tracked: dict[str, Any], condition: str = "") -> list[Any]:
    state = tracked["state"]
    return list(tracked["client"].search_runs([state.experiment_id], filter_string=condition, max_results=100))


def test_the_study_is_written_to_its_end(tracked: dict[str, Any]) -> None:
    state = tracked["state"]
    assert (state.status, state.ended) == ("drained", True)
    assert tracked["reference"]["run_id"] == state.run_id
    assert state.tracking_uri == f"sqlite:///{tracked['runs'] / 'mlflow.db'}"
    children = _runs(tracked, f"tags.`mlflow.parentRunId` = '{state.run_id}'")
    assert len(children) == len(tracked["records"])


def test_a_trial_has_its_policy_metrics_curves_and_tags(tracked: dict[str, Any]) -> None:
    (run,) = _runs(tracked, "tags.`autoprec.number` = '4'")
    assert run.data.params["layer/h._.attn"] == "bf16"
    assert run.data.params["fp8.amax_history_len"] == "16"
    assert run.data.metrics["step_time_ms"] == 6.0
    assert run.data.tags["pareto"] == "true"
    assert run.data.tags["preset"] == "false"
    for name in ("loss", "reference_loss"):
        history = tracked["client"].get_metric_history(run.info.run_id, name)
        assert [point.step for point in history] == list(range(10))
    files = [artifact.path for artifact in tracked["client"].list_artifacts(run.info.run_id)]
    assert files == ["policy.yaml"]
    assert run.info.status == "FINISHED"


def test_a_trial_has_a_row_of_its_own_and_its_paired_seeds_do_not(tracked: dict[str, Any]) -> None:
    rows = _runs(tracked, "tags.`autoprec.row` = 'policy'")
    assert sorted(run.data.tags["autoprec.kind"] for run in rows) == ["preset"] * 2 + ["reference"] + ["search"] * 3
    (run,) = _runs(tracked, "tags.`autoprec.number` = '4'")
    assert run.data.metrics["step_ms"] == 6.0
    assert run.data.metrics["divergence_pct"] == 0.04


def test_a_resumed_study_shows_one_answer_and_the_trials_it_was_given(tmp_path: Path) -> None:
    records = make_records()
    first = make_result(records)
    second = replace(first, best={**first.best, "step_time_ms": 2.0, "speedup": 1.1, "name": "search 5"})
    for trials, result in ((10, first), (20, second)):
        with Tracker.open(tmp_path / "runs" / "again", study="again") as tracker:
            tracker.study_started({"trials": trials})
            tracker.finished(result)
            state = tracker.close(120)
    from mlflow.tracking import MlflowClient

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run = MlflowClient(tracking_uri=state.tracking_uri).get_run(state.run_id)
    assert run.data.metrics["step_time_ms"] == 2.0
    assert run.data.metrics["speedup"] == 1.1, "not the larger 2.5 of the answer before"
    assert run.data.tags["autoprec.trials"] == "20"


def test_a_failed_trial_says_why(tracked: dict[str, Any]) -> None:
    (run,) = _runs(tracked, "tags.`autoprec.number` = '7'")
    assert run.info.status == "FAILED"
    assert run.data.tags["autoprec.reason"] == "loss is NaN"


def test_tags_that_change_later_update_the_same_run(tracked: dict[str, Any]) -> None:
    (run,) = _runs(tracked, "tags.`autoprec.number` = '5'")
    assert run.data.tags["pareto"] == "true"


@pytest.mark.parametrize(("tag", "count"), [("preset", 2), ("finalist", 1), ("pareto", 2), ("pruned", 0)])
def test_trials_can_be_filtered_by_tag(tracked: dict[str, Any], tag: str, count: int) -> None:
    assert len(_runs(tracked, f"tags.`{tag}` = 'true'")) == count


def test_the_study_run_carries_the_winner_table_and_the_files(tracked: dict[str, Any]) -> None:
    run = tracked["client"].get_run(tracked["state"].run_id)
    note = run.data.tags["mlflow.note.content"]
    assert "| **the policy** | 2.50x |" in note
    assert "preset: preset 2" in note
    assert run.data.metrics["speedup"] == 2.5
    assert run.data.params["target"] == "cpu"
    assert [a.path for a in tracked["client"].list_artifacts(run.info.run_id)] == ["policy.yaml", "report.html"]
    assert run.info.status == "FINISHED"


def test_the_policy_is_registered_once(tracked: dict[str, Any]) -> None:
    (version,) = tracked["client"].search_model_versions("name='autoprec-demo'")
    assert version.run_id == tracked["state"].run_id
    assert version.source.endswith("/policy.yaml")


def test_no_secret_reaches_the_spool_or_the_store(tracked: dict[str, Any]) -> None:
    for path in [*(tracked["runs"] / "demo").rglob("*"), tracked["runs"] / "mlflow.db"]:
        if path.is_file():
            assert b"s3cret" not in path.read_bytes()
    run = tracked["client"].get_run(tracked["state"].run_id)
    assert run.data.params["script"] == "train.py --api-key [hidden] --lr=1"


def test_replaying_from_nothing_changes_nothing(tracked: dict[str, Any]) -> None:
    before = {run.info.run_id: (run.data.metrics, run.data.tags) for run in _runs(tracked)}
    for state in (tracked["runs"] / "demo" / "tracking").glob("state-*.json"):
        state.unlink()
    (report,) = sync(tracked["runs"])
    assert report.ok
    assert report.sent > len(tracked["records"])
    assert {run.info.run_id: (run.data.metrics, run.data.tags) for run in _runs(tracked)} == before
    points = tracked["client"].get_metric_history(_runs(tracked, "tags.`autoprec.number` = '4'")[0].info.run_id, "loss")
    assert len(points) == 10
    (again,) = sync(tracked["runs"])
    assert (again.ok, again.sent) == (True, 0)


def _track(directory: Path, uri: str, records: list[TrialRecord], result: SearchResult) -> tuple[float, dict[str, Any]]:
    start = time.monotonic()
    tracker = Tracker.open(directory, study="demo", tracking_uri=uri)
    tracker.study_started({})
    for record in records:
        tracker.trial(record)
    reference = tracker.finished(result)
    tracker.close()
    return time.monotonic() - start, reference


def test_a_dead_server_costs_less_than_two_seconds_and_loses_nothing(
    tmp_path: Path, tracked: dict[str, Any], records: list[TrialRecord], result: SearchResult
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    seconds, reference = _track(tmp_path / "study", f"http://127.0.0.1:{port}", records, result)
    assert seconds < 2.0
    assert reference["run_id"] is None
    (failed,) = sync(tmp_path)
    assert not failed.ok
    assert "does not answer" in failed.reason
    (sent,) = sync(tmp_path, tracking_uri=tracked["state"].tracking_uri, experiment="replayed")
    assert sent.ok
    found = tracked["client"].search_runs([sent.experiment_id], filter_string="tags.`autoprec.role` = 'trial'")
    assert len(found) == len(records)


def test_a_server_that_accepts_and_never_answers_costs_less_than_two_seconds(
    tmp_path: Path, records: list[TrialRecord], result: SearchResult
) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen(8)
        uri = f"http://127.0.0.1:{silent.getsockname()[1]}"
        seconds, _ = _track(tmp_path / "study", uri, records, result)
    assert seconds < 2.0


def test_a_search_that_is_killed_leaves_everything_and_its_run_says_killed(
    tmp_path: Path, tracked: dict[str, Any]
) -> None:
    code = f"""
import sys, time
sys.path.insert(0, {str(Path(__file__).resolve().parents[2])!r})
from tests.tracking.conftest import make_records
from autoprec.tracking import Tracker
tracker = Tracker.open({str(tmp_path / "study")!r}, study="killed", tracking_uri={tracked["state"].tracking_uri!r})
tracker.study_started({{}})
for record in make_records():
    tracker.trial(record)
print("ready", flush=True)
time.sleep(60)
"""
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert child.stdout is not None
    assert child.stdout.readline() == b"ready\n"
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    child.stdout.close()
    client, state = tracked["client"], tracked["state"]
    deadline = time.monotonic() + 60
    status = ""
    while status != "KILLED" and time.monotonic() < deadline:
        time.sleep(0.5)
        found = client.search_runs([state.experiment_id], filter_string="attributes.run_name = 'killed'")
        status = found[0].info.status if found else ""
    assert status == "KILLED"
    children = client.search_runs(
        [state.experiment_id], filter_string=f"tags.`mlflow.parentRunId` = '{found[0].info.run_id}'"
    )
    assert len(children) == 8
