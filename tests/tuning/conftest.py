from __future__ import annotations

import atexit
import functools
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest


@functools.cache
def empty_database() -> Path:
    """Return a SQLite file with Optuna's tables and nothing in them: making these takes longer than a small search."""
    from autoprec.tuning.study.storage import open_storage
    from autoprec.tuning.study.study import default_storage

    folder = Path(tempfile.mkdtemp(prefix="autoprec-empty-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    open_storage(default_storage(folder)).engine.dispose()
    return folder / "study.db"


@pytest.fixture(autouse=True)
def nothing_is_timed_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search times three products of this CPU in a process with PyTorch; here, where a test asks for their rates."""
    if "autoprec.tuning.engine" in sys.modules:
        monkeypatch.setattr("autoprec.tuning.engine.cpu_rates", lambda: None)


@pytest.fixture(autouse=True)
def databases_begin_with_their_tables(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copy Optuna's tables into a study's new database, but where the study's own storage is what is tested."""
    study = sys.modules.get("autoprec.tuning.study.study")
    if study is None or "study" in request.path.parts:
        return
    from autoprec.tuning.study.storage import sqlite_file

    real = study.open_storage

    def opened(url: str) -> Any:
        path = sqlite_file(url)
        if path is not None and path.parent.is_dir() and not path.exists():
            shutil.copy(empty_database(), path)
        return real(url)

    monkeypatch.setattr(study, "open_storage", opened)
