"""The order in which files of tests are run: the longest first, so that no process is left alone with one at the end.

    pytest -n 2 --dist loadscope --no-loadscope-reorder --record-durations     # write the table again (make durations)

A file that the table does not know comes first, since nobody knows how long it takes.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

#: Seconds of every file, set-up and tear-down included.
TABLE = Path(__file__).with_name("durations.json")


def longest_first(items: list[pytest.Item]) -> None:
    """Sort tests by the seconds of their files; those of one file stay together, in their order."""
    seconds: dict[str, float] = json.loads(TABLE.read_text(encoding="utf-8"))

    def place(item: pytest.Item) -> tuple[float, str]:
        file = item.nodeid.partition("::")[0]
        return -seconds.get(file, float("inf")), file

    items.sort(key=place)


class Recorder:
    """Adds up how long the tests of every file took, and writes the table at the end of a run of all of them."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid.partition("::")[0]] += report.duration  # type: ignore[assignment]

    def pytest_sessionfinish(self) -> None:
        rounded = {file: round(value, 1) for file, value in sorted(self.seconds.items())}
        TABLE.write_text(json.dumps(rounded, indent=0) + "\n", encoding="utf-8")
