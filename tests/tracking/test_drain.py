"""The background process: what it does with a server that is gone, refuses, or dies, and when it ends."""

from __future__ import annotations

import http.server
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from autoprec.support.files import file_lock
from autoprec.tracking import drain as module
from autoprec.tracking.drain import drain, drain_until_end, reachable
from autoprec.tracking.spool import Spool, State

pytestmark = pytest.mark.filterwarnings("ignore")

NOBODY = "http://127.0.0.1:9"


class FakeWriter:
    """Takes events as the writer of a store does, and fails at one of them."""

    def __init__(self, fail_at: str = "") -> None:
        self.fail_at, self.seen = fail_at, []
        self.store, self.state = self, State()
        self.run_id = "run"

    def apply(self, event: dict[str, Any]) -> None:
        if event["kind"] == self.fail_at:
            raise ValueError("refused, token=abc123secret")
        self.seen.append(event["kind"])


@pytest.fixture
def spool(tmp_path: Path) -> Spool:
    made = Spool.of(tmp_path / "study")
    for kind in ("open", "study", "trial", "end"):
        made.append(kind)
    return made


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


def test_a_local_store_can_always_be_reached() -> None:
    assert reachable("sqlite:////nowhere/mlflow.db") == ""


def test_a_server_that_answers_anything_is_there(refusing: str) -> None:
    assert reachable(refusing) == ""


def test_a_server_that_is_gone_is_named_without_its_login() -> None:
    reason = reachable("http://me:secret@127.0.0.1:9")
    assert "does not answer" in reason
    assert "secret" not in reason


def test_events_are_written_once_and_in_order(spool: Spool) -> None:
    writer, steps = FakeWriter(), []
    state, kept = drain(spool, "sqlite:///x", "e", writer=writer, progress=lambda: steps.append(1))
    assert writer.seen == ["open", "study", "trial", "end"]
    assert kept is writer
    assert (state.status, state.ended, state.offset, state.run_id) == ("drained", True, spool.size, "run")
    drain(spool, "sqlite:///x", "e", writer=writer, progress=lambda: steps.append(1))
    assert len(writer.seen) == len(steps) == 4


def test_what_failed_is_tried_again_from_the_event_that_failed(spool: Spool) -> None:
    state, kept = drain(spool, "sqlite:///x", "e", writer=FakeWriter(fail_at="trial"))
    assert kept is None
    assert state.status == "failed"
    assert state.reason.startswith("ValueError: refused")
    assert "abc123secret" not in state.reason
    writer = FakeWriter()
    state, _ = drain(spool, "sqlite:///x", "e", writer=writer)
    assert writer.seen == ["trial", "end"]
    assert (state.status, state.reason) == ("drained", "")


def test_a_server_that_is_gone_is_in_the_state_and_nothing_is_lost(spool: Spool) -> None:
    state, kept = drain(spool, NOBODY, "e", writer=FakeWriter())
    assert kept is None
    assert state.status == "unreachable"
    assert spool.load_state(NOBODY).offset == 0


def test_a_spool_that_was_replaced_is_read_from_its_start(spool: Spool) -> None:
    spool.save_state("sqlite:///x", State(offset=spool.size + 100))
    writer = FakeWriter()
    drain(spool, "sqlite:///x", "e", writer=writer)
    assert len(writer.seen) == 4


@pytest.fixture
def unwatched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the thread that ends the whole process, which is the tests' own here."""
    monkeypatch.setattr(module, "_watched", lambda *_: None)


@pytest.mark.usefixtures("unwatched")
def test_the_process_of_a_study_that_ended_without_a_server_gives_up(spool: Spool) -> None:
    assert drain_until_end(spool, NOBODY, "e", os.getppid()) == 1


@pytest.mark.usefixtures("unwatched")
def test_a_second_process_of_one_study_leaves_it_to_the_first(spool: Spool) -> None:
    with file_lock(spool.directory / "drain.lock", what="study's tracking"):
        assert drain_until_end(spool, NOBODY, "e", os.getppid()) == 0


def test_processes_are_seen_to_live_and_to_be_gone() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    assert module._alive(os.getpid())
    assert not module._alive(child.pid)


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
    deadline = time.monotonic() + 180
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
