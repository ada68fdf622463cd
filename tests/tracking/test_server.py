"""``autoprec ui``: the server comes up on the loopback, serves the trials, and ends with the command."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from autoprec.errors import AutoPrecError, FileError, MissingDependencyError
from autoprec.tracking import Tracker
from autoprec.tracking.server import free_port, newest_study, serve
from tests.tracking.conftest import make_records

ROOT = Path(__file__).resolve().parents[2]


def test_the_newest_study_with_trials_is_opened_rather_than_an_empty_stay(tmp_path: Path) -> None:
    records = make_records()
    for number, (name, own) in enumerate((("older", records), ("tried", records), ("stay", records[:2]))):
        tracker = Tracker.open(tmp_path / name, study=name, tracking_uri="http://127.0.0.1:9")
        for record in own:
            tracker._spool.append("trial", record=record.to_json())
        os.utime(tmp_path / name / "tracking" / "spool.jsonl", (1e9 + number, 1e9 + number))
    assert newest_study(tmp_path).name == "tried"
    assert newest_study(tmp_path, "stay").name == "stay"


@pytest.mark.slow
def test_the_page_is_served_and_the_server_ends_with_the_command(tracked: dict[str, Any]) -> None:
    code = "from autoprec.cli import cli; cli.main()"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-W", "ignore", "-c", code, "ui", str(tracked["runs"]), "--no-open", "--port", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})
    try:
        assert process.stdout is not None
        url = process.stdout.readline().decode().strip()
        assert url.startswith(f"http://127.0.0.1:{port}/#/experiments/{tracked['state'].experiment_id}/runs?viewState")
        base = url.split("/#")[0]
        with urllib.request.urlopen(base + "/", timeout=30) as page:
            assert page.status == 200
        body = json.dumps(
            {
                "experiment_ids": [tracked["state"].experiment_id],
                "filter": "tags.`autoprec.role` = 'trial' AND tags.`autoprec.study` = 'demo'",
                "order_by": ["metrics.`speedup` DESC"],
            }
        ).encode()
        request = urllib.request.Request(
            base + "/api/2.0/mlflow/runs/search", data=body, headers={"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            runs = json.load(answer)["runs"]
        assert runs[0]["info"]["run_name"] == "006 finalist 6 (seed 1)"
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=30)
        process.stdout.close()
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0


def test_the_newest_study_is_chosen_unless_named(tmp_path: Path) -> None:
    for age, name in ((20, "old"), (10, "new")):
        Tracker.open(tmp_path / name, study=name)
        spool = tmp_path / name / "tracking" / "spool.jsonl"
        stamp = spool.stat().st_mtime - age
        os.utime(spool, (stamp, stamp))
    assert newest_study(tmp_path).name == "new"
    assert newest_study(tmp_path, "old").name == "old"
    assert newest_study(tmp_path).tracking_uri.endswith("/mlflow.db")
    with pytest.raises(FileError, match="old, new"):
        newest_study(tmp_path, "missing")


def test_a_taken_port_is_replaced() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert free_port(port) != port


def test_without_the_web_interface_the_pip_line_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autoprec.tracking.server.installed_version", lambda name: None)
    with pytest.raises(MissingDependencyError, match=r"autoprec\[ui\]"), serve("sqlite:///nowhere.db", 0):
        pass


def test_a_dead_server_address_is_a_clear_error() -> None:
    with pytest.raises(AutoPrecError, match="does not answer"), serve("http://127.0.0.1:9", 0):
        pass
