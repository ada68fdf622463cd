"""The order of the tests: longest files first, unknown ones before them, each in one piece."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import schedule
from tests.documents import ROOT


def test_long_files_come_first_and_stay_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule, "TABLE", tmp_path / "table.json")
    recorder = schedule.Recorder()
    for name, seconds in (("a.py::one", 1.0), ("b.py::one", 2.0), ("a.py::two", 3.04), ("c.py::one", 2.0)):
        report: Any = SimpleNamespace(nodeid=name, duration=seconds)
        recorder.pytest_runtest_logreport(report)
    recorder.pytest_sessionfinish()
    assert json.loads(schedule.TABLE.read_text()) == {"a.py": 4.0, "b.py": 2.0, "c.py": 2.0}
    names = ["c.py::one", "b.py::one", "a.py::one", "new.py::one", "b.py::two", "a.py::two"]
    items: Any = [SimpleNamespace(nodeid=name) for name in names]
    schedule.longest_first(items)
    assert [item.nodeid for item in items] == [
        "new.py::one", "a.py::one", "a.py::two", "b.py::one", "b.py::two", "c.py::one",
    ]  # fmt: skip


def test_the_table_is_of_this_suite() -> None:
    known = set(json.loads(schedule.TABLE.read_text(encoding="utf-8")))
    here = {str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py")}
    stale = sorted(known ^ here)
    assert len(stale) < len(here) / 10, f"write it again with `make durations`: {', '.join(stale)}"
