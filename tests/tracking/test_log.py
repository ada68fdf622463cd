"""MLflow is brought up to date with a study: whatever was missing, once, and from no address that a folder names."""

from __future__ import annotations

import http.server
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from autoprec.errors import AutoPrecError
from autoprec.support.files import file_lock
from autoprec.tracking import log
from autoprec.tracking.log import log_study, reachable
from autoprec.tracking.study import TrackedStudy
from tests.tracking.conftest import make_records, make_study, tracked_runs

pytestmark = pytest.mark.filterwarnings("ignore")

NOBODY = "http://127.0.0.1:9"
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def refusing() -> Iterator[str]:
    """A server that answers every request with 403."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(403)

        def log_message(self, *_: Any) -> None:
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


def test_what_mlflow_reads_is_set_while_it_logs_and_a_persons_own_settings_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A search in a notebook goes on as the process that it was, and so does what it starts."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "77")
    monkeypatch.delenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", raising=False)
    seen: dict[str, str | None] = {}

    def write(*_: Any) -> Any:
        for name in ("TIMEOUT", "MAX_RETRIES"):
            seen[name] = os.environ.get(f"MLFLOW_HTTP_REQUEST_{name}")
        raise OSError("no store")

    monkeypatch.setattr(log, "_write", write)
    assert log_study(make_study(tmp_path / "s").path).reason == "OSError: no store"
    assert seen == {"TIMEOUT": "77", "MAX_RETRIES": "1"}
    assert os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"] == "77"
    assert "MLFLOW_HTTP_REQUEST_MAX_RETRIES" not in os.environ


def test_a_local_store_can_always_be_reached() -> None:
    assert reachable("sqlite:////nowhere/mlflow.db") == ""


def test_a_server_that_answers_anything_is_there(refusing: str) -> None:
    assert reachable(refusing) == ""


def test_a_server_that_is_gone_is_named_without_its_login() -> None:
    reason = reachable("http://me:secret@127.0.0.1:9")
    assert "does not answer" in reason
    assert "secret" not in reason


def test_the_study_is_written_to_its_end(tracked: dict[str, Any]) -> None:
    state = tracked["logged"]
    assert state.reason == ""
    assert tracked["mlflow"]["run_id"] == state.run_id
    assert state.tracking_uri == f"sqlite:///{tracked['runs'] / 'mlflow.db'}"
    children = tracked_runs(tracked, f"tags.`mlflow.parentRunId` = '{state.run_id}'")
    assert len(children) == len(tracked["records"])


def test_no_secret_reaches_the_folder_or_the_store(tracked: dict[str, Any]) -> None:
    for path in [*(tracked["runs"] / "demo").rglob("*"), tracked["runs"] / "mlflow.db"]:
        if path.is_file():
            assert b"s3cret" not in path.read_bytes()
    run = tracked["client"].get_run(tracked["logged"].run_id)
    assert run.data.params["script"] == "train.py --api-key [hidden] --lr=1"


def test_logging_again_changes_nothing_and_what_was_cut_short_is_written_again(tracked: dict[str, Any]) -> None:
    before = {run.info.run_id: (run.data.metrics, run.data.tags) for run in tracked_runs(tracked)}
    again = log_study(tracked["runs"] / "demo")
    assert (again.reason, again.written) == ("", 0)
    (run,) = tracked_runs(tracked, "tags.`autoprec.number` = '4'")
    tracked["client"].set_tag(run.info.run_id, "autoprec.logged", "")  # as a writer that was killed leaves it
    once = log_study(tracked["runs"] / "demo")
    assert (once.reason, once.written) == ("", 1)
    assert {run.info.run_id: (run.data.metrics, run.data.tags) for run in tracked_runs(tracked)} == before
    assert len(tracked["client"].get_metric_history(run.info.run_id, "loss")) == 10


def test_a_folder_that_was_moved_is_logged_elsewhere_from_its_own_database(
    tmp_path: Path, tracked: dict[str, Any]
) -> None:
    moved = tmp_path / "elsewhere" / "demo"
    shutil.copytree(tracked["runs"] / "demo", moved)
    done = log_study(moved, tracked["logged"].tracking_uri, "moved")
    found = tracked["client"].search_runs([done.experiment_id], "tags.`autoprec.role` = 'trial'")
    assert len(found) == len(tracked["records"])
    assert done.written == len(found) + 1


@pytest.mark.parametrize("address", ["http://evil.example", "https://a@evil", "databricks://x", "postgresql://evil/x"])
def test_a_server_is_never_taken_from_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    """Somebody else's folder must not choose what server is sent the user's MLFLOW_TRACKING_TOKEN."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setattr(log, "_write", lambda *_args, **_more: pytest.fail("asked the folder's server"))
    found = log_study(make_study(tmp_path / "s", tracking_uri=address).path)
    assert (found.ok, found.written) == (False, 0)
    assert "MLFLOW_TRACKING_URI" in found.reason


def test_a_study_that_is_being_sent_is_waited_for_and_then_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_study(tmp_path / "s")
    monkeypatch.setattr(log, "_PATIENCE_S", 0.3)
    with file_lock(folder.own / "lock", what="study's tracking"):
        found = log_study(folder.path, NOBODY)
    assert not found.ok
    assert "in use by pid" in found.reason


def test_a_server_that_is_gone_keeps_everything(tmp_path: Path) -> None:
    folder = make_study(tmp_path / "s", make_records())
    found = log_study(folder.path, NOBODY, "e")
    assert "does not answer" in found.reason
    assert len(folder.records()) == len(make_records())


def test_a_damaged_study_is_a_reason_not_an_error(tmp_path: Path) -> None:
    folder = make_study(tmp_path / "s", make_records())
    (folder.path / "study.db").write_bytes(b"no database" * 100)
    assert "damaged" in log_study(folder.path, f"sqlite:///{tmp_path / 'x.db'}").reason


def test_a_link_out_of_the_folder_is_not_sent(tmp_path: Path) -> None:
    (tmp_path / "id_rsa").write_text("key")
    folder = make_study(tmp_path / "s")
    (folder.path / "report.html").symlink_to(tmp_path / "id_rsa")
    (folder.path / "result.json").write_text("x")
    assert [path.name for path in folder.files()] == ["result.json"]


def _trials(folder: Path) -> int:
    """Return how many runs the study of a search that is at work holds so far."""
    try:
        return len(TrackedStudy(folder).records())
    except AutoPrecError:
        return 0


@pytest.mark.slow
def test_a_search_that_is_killed_loses_nothing(tmp_path: Path, tracked: dict[str, Any]) -> None:
    """``kill -9`` in mid-search: the next ``autoprec ui`` logs every finished trial."""
    uri = tracked["logged"].tracking_uri
    words = ["0.3", "search", "-q", "--trials", "20", "--seeds", "2", "--study", "killed"]
    child = subprocess.Popen(
        [sys.executable, str(ROOT / "tests/faults/cli_driver.py"), *words],
        cwd=tmp_path, env=os.environ | {"MLFLOW_TRACKING_URI": uri}, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    folder = tmp_path / "autoprec-runs" / "killed"
    deadline = time.monotonic() + 120
    while not _trials(folder) >= 3:
        assert time.monotonic() < deadline
        assert child.poll() is None
        time.sleep(0.1)
    os.killpg(child.pid, signal.SIGKILL)
    child.wait()
    done = log_study(folder, uri)
    assert done.ok, done.reason
    assert TrackedStudy(folder).told() == done.tracking_uri, "and the one after that has nothing to log"
    run = tracked["client"].get_run(done.run_id)
    assert run.info.status == "KILLED"
    mine = f"tags.`mlflow.parentRunId` = '{done.run_id}'"
    stored = len(TrackedStudy(folder).records())
    assert len(tracked["client"].search_runs([done.experiment_id], mine)) == stored >= 3
