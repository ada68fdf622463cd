"""``autoprec ui`` on the command line; the server itself is tested in tests/tracking/test_server.py."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from autoprec.cli.machine.ui import ui
from autoprec.errors import FileError
from autoprec.tracking.log import Logged
from autoprec.tracking.study import TrackedStudy, store_of
from tests.cli.helpers import autoprec
from tests.tracking.conftest import make_records, make_result, make_study


def test_without_a_study_it_says_so(tmp_path: Path) -> None:
    assert isinstance(CliRunner().invoke(ui, [str(tmp_path)]).exception, FileError)


@pytest.mark.parametrize(("browser", "display"), [(True, ":0"), (False, ":0"), (True, "")])
def test_the_address_is_printed_and_opened(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, browser: bool, display: str
) -> None:
    for name in ("BROWSER", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("DISPLAY", display)
    if not browser:
        monkeypatch.setenv("BROWSER", "none")
    make_study(tmp_path / "killed")
    make_study(tmp_path / "answered", result=make_result(make_records()))
    make_study(tmp_path / "demo")
    logged: list[Path] = []

    def log_study(path: Path) -> Logged:
        logged.append(path)
        return Logged("demo", "", reason="its server is away", experiment_id="3")

    opened: list[str] = []

    @contextlib.contextmanager
    def serve(uri: str, port: int) -> Iterator[str]:
        assert uri.startswith("sqlite:////")
        assert port > 0
        yield "http://127.0.0.1:1"

    def interrupt() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("autoprec.tracking.server.serve", serve)
    monkeypatch.setattr("autoprec.tracking.log.log_study", log_study)
    monkeypatch.setattr("click.launch", opened.append)
    monkeypatch.setattr("signal.pause", interrupt)
    done = CliRunner().invoke(ui, [str(tmp_path)])
    assert done.exception is None
    assert done.stdout.startswith("http://127.0.0.1:1/#/experiments/3/")
    assert logged == [tmp_path / "demo", tmp_path / "killed"], "and a search that was killed does not run for ever"
    killed = TrackedStudy(tmp_path / "killed")
    (killed.own / "told").write_text(store_of(killed))
    CliRunner().invoke(ui, [str(tmp_path)])
    assert logged[2:] == [tmp_path / "demo"], "which is told once"
    os.utime(killed.own / "told", (0, 0))  # it went on since
    CliRunner().invoke(ui, [str(tmp_path)])
    assert logged[3:] == [tmp_path / "demo", tmp_path / "killed"]
    assert "its server is away" in done.stderr
    assert "starting MLflow on demo" in done.stderr
    assert bool(opened) is (browser and bool(display))
    assert ("no browser here" in done.stderr) is not bool(opened)


def test_without_a_study_there_is_nothing_to_send(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing"):
        assert autoprec("ui", "--sync", path).code == 2


@pytest.mark.parametrize(
    ("report", "code", "text"),
    [
        (Logged("a", "sqlite:///x", 3, run_id="r1"), 0, "3 runs sent"),
        (Logged("a", "sqlite:///x"), 0, "nothing was missing"),
        (Logged("a", "http://x", 0, "does not answer"), 1, "not sent"),
    ],
)
def test_outcomes_of_sending(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, report: Logged, code: int, text: str
) -> None:
    make_study(tmp_path / "a")
    monkeypatch.setattr("autoprec.tracking.log.log_study", lambda *_, **__: report)
    done = autoprec("ui", "--sync", tmp_path)
    assert done.code == code
    assert text in done.out + done.err
