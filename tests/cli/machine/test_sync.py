"""``autoprec ui --sync``."""

from __future__ import annotations

from pathlib import Path

import pytest

from autoprec.tracking.replay import SyncReport
from tests.cli.helpers import autoprec


def test_no_studies_is_an_error(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing"):
        assert autoprec("ui", "--sync", path).code == 2


@pytest.mark.parametrize(
    ("report", "code", "text"),
    [
        (SyncReport("a", "sqlite:///x", 3, True, run_id="r1"), 0, "3 records sent"),
        (SyncReport("a", "sqlite:///x", 0, True), 0, "nothing was missing"),
        (SyncReport("a", "http://x", 0, False, "does not answer"), 1, "not sent"),
    ],
)
def test_outcomes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, report: SyncReport, code: int, text: str) -> None:
    def replay(_runs: Path, **kwargs: object) -> list[SyncReport]:
        show = kwargs["report"]
        assert callable(show)
        show(report)
        return [report]

    monkeypatch.setattr("autoprec.tracking.replay.sync", replay)
    done = autoprec("ui", "--sync", tmp_path)
    assert done.code == code
    assert text in done.out + done.err
