"""``autoprec ui``: the server comes up on the loopback, serves the trials, and ends with the command."""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autoprec.errors import AutoPrecError, FileError, MissingDependencyError
from autoprec.support.files import file_lock
from autoprec.tracking.server import free_port, newest_study, serve
from autoprec.tracking.study import TrackedStudy
from tests.tracking.conftest import make_records, make_result, make_study

ROOT = Path(__file__).resolve().parents[2]


def _last_written(study: TrackedStudy, when: float) -> None:
    for path in study.path.rglob("*"):
        os.utime(path, (when, when))


def test_the_newest_study_with_an_answer_is_opened_rather_than_one_that_shows_nothing(tmp_path: Path) -> None:
    records = make_records()
    answer = make_result(records)
    studies = {
        "older": (records, answer),
        "answered": (records, answer),
        "cut short": (records, replace(answer, verdict="undecided")),
        "stay": (records[:2], answer),
    }
    for number, (name, (own, result)) in enumerate(studies.items()):
        _last_written(make_study(tmp_path / name, own, result), 1e9 + number)
    assert newest_study(tmp_path).path.name == "answered"
    assert newest_study(tmp_path / "stay").path.name == "stay"
    make_study(tmp_path / "running", records[:5])
    with file_lock(tmp_path / "running" / "lock", what="study"):
        assert newest_study(tmp_path).path.name == "running", "to watch it while trials run"


@pytest.fixture(scope="module")
def served(tracked: dict[str, Any]) -> Iterator[str]:
    """Start ``autoprec ui`` on the tracked study and yield the address it prints; the server ends with the command."""
    code = "from autoprec.cli import cli; cli.main()"
    port = free_port(0)
    command = [sys.executable, "-W", "ignore", "-c", code, "ui", str(tracked["runs"]), "--port", str(port)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT), "BROWSER": "none"}
    )
    try:
        assert process.stdout is not None
        yield process.stdout.readline().decode().strip()
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=30)
        process.stdout.close()
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0


@pytest.mark.slow
def test_the_trials_are_served(tracked: dict[str, Any], served: str) -> None:
    assert f"/#/experiments/{tracked['logged'].experiment_id}/runs?workflowType" in served
    base = served.split("/#")[0]
    body = json.dumps(
        {
            "experiment_ids": [tracked["logged"].experiment_id],
            "filter": "tags.`autoprec.role` = 'trial' AND tags.`autoprec.study` = 'demo'",
            "order_by": ["metrics.`speedup` DESC"],
        }
    ).encode()
    request = urllib.request.Request(
        base + "/api/2.0/mlflow/runs/search", data=body, headers={"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        runs = json.load(answer)["runs"]
    names = [run["info"]["run_name"] for run in runs]
    speedups = [
        next((metric["value"] for metric in run["data"]["metrics"] if metric["key"] == "speedup"), 0.0) for run in runs
    ]
    assert speedups == sorted(speedups, reverse=True), "the fastest first"
    fastest = [name for name, speedup in zip(names, speedups, strict=True) if speedup == speedups[0]]
    assert any("search 5" in name for name in fastest)  # over its seeds, search 4 is as fast
    assert any("(seed" in name for name in names)
    with urllib.request.urlopen(base + "/", timeout=30) as answer:
        assert b"autoOpenedOnFirstLoad" in answer.read()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("charts", "seen"),
    [
        (False, ["best", "pareto", "gain", "step_ms", "divergence_pct", "★ search 5", "0.07"]),
        (True, ["★ search 5", "step_ms vs. divergence_pct", "loss vs reference_loss", "Parallel Coordinates",
                "loss_gap_pct", "Model metrics"]),
    ],
    ids=["table", "charts"],
)  # fmt: skip
def test_a_person_sees_it_in_a_browser(served: str, charts: bool, seen: list[str], tmp_path: Path) -> None:
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("needs Chromium")
    command = [chromium, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    command += ["--window-size=1600,1400", f"--virtual-time-budget={90_000 if charts else 20_000}", "--dump-dom"]
    address = served + "&compareRunsMode=CHART" * charts
    page = subprocess.run([*command, address], capture_output=True, text=True, timeout=240, check=False).stdout
    text = html.unescape(re.sub(r"<(script|style).*?</\1>|<[^>]+>", "\n", page, flags=re.DOTALL))
    places = {word: text.find(word) for word in seen}
    assert -1 not in places.values(), places
    assert not charts or list(places.values()) == sorted(places.values()), "the most telling chart comes first"
    assert "(seed 1)" not in text, "one row per policy"
    assert "Ask a question" not in text, "the assistant is closed"


def test_the_newest_study_is_chosen_unless_named(tmp_path: Path) -> None:
    for age, name in ((20, "old"), (10, "new")):
        _last_written(make_study(tmp_path / name), 1e9 - age)
    assert newest_study(tmp_path).path.name == "new"
    assert newest_study(tmp_path / "old").path.name == "old"
    with pytest.raises(FileError, match="new, old"):
        newest_study(tmp_path / "missing")


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
