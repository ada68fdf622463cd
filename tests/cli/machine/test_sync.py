"""``autoprec ui --sync``."""

from __future__ import annotations

from pathlib import Path

import pytest

from autoprec.tracking import Logged
from tests.cli.helpers import autoprec
from tests.tracking.conftest import make_study


def test_no_studies_is_an_error(tmp_path: Path) -> None:
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
def test_outcomes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, report: Logged, code: int, text: str) -> None:
    make_study(tmp_path / "a")
    monkeypatch.setattr("autoprec.tracking.log.log_study", lambda *_: report)
    done = autoprec("ui", "--sync", tmp_path)
    assert done.code == code
    assert text in done.out + done.err
