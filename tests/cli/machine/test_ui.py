"""``autoprec ui`` on the command line; the server itself is tested in tests/tracking/test_server.py."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from autoprec.cli.machine.ui import ui
from autoprec.errors import FileError
from autoprec.tracking import Tracker


def test_without_a_study_it_says_so(tmp_path: Path) -> None:
    assert isinstance(CliRunner().invoke(ui, [str(tmp_path), "--no-open"]).exception, FileError)


@pytest.mark.parametrize(("browser", "display"), [(True, ":0"), (False, ":0"), (True, "")])
def test_the_address_is_printed_and_opened(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, browser: bool, display: str
) -> None:
    for name in ("BROWSER", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("DISPLAY", display)
    Tracker.open(tmp_path / "demo", study="demo")
    opened: list[str] = []

    @contextlib.contextmanager
    def serve(uri: str, port: int) -> Iterator[str]:
        assert uri.startswith("sqlite:////")
        assert port > 0
        yield "http://127.0.0.1:1"

    def interrupt() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("autoprec.tracking.server.serve", serve)
    monkeypatch.setattr("click.launch", opened.append)
    monkeypatch.setattr("signal.pause", interrupt)
    done = CliRunner().invoke(ui, [str(tmp_path)] + ([] if browser else ["--no-open"]))
    assert done.exception is None
    assert done.stdout.startswith("http://127.0.0.1:1/#/experiments/")
    assert "starting MLflow on demo" in done.stderr
    assert bool(opened) is (browser and bool(display))
    assert ("no browser here" in done.stderr) is (browser and not display)
