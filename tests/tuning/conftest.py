from __future__ import annotations

from pathlib import Path

import pytest

from autoprec.cost.calibrate import calibration


@pytest.fixture(autouse=True)
def kept_calibrations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Keep what `autoprec calibrate` may have left on this machine away from searches, and return where it would be."""
    folder = tmp_path / "cache"
    monkeypatch.setattr(calibration, "cache_folder", lambda: folder)
    return folder
