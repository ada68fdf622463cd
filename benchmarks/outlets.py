"""Outlets: exporters that conform, size of the report, cost of tracking (also with a dead and with a silent server)."""

import socket
import sys
import tempfile
import time
import warnings
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from autoprec.errors import MissingDependencyError
from autoprec.export import EXPORTERS, Request, exporter
from autoprec.report.html import html_report
from autoprec.testing.exporters import MODELS, POLICIES, check_files, check_operators, differences
from autoprec.tracking import Tracker
from tests.export.readers import READERS
from tests.tracking.conftest import make_records, make_result


def problems_of(name: str) -> list[str]:
    """Return what the conformance suite finds wrong with an exporter."""
    found = []
    for policy in POLICIES.values():
        for layers in MODELS.values():
            request = Request(policy, layers)
            done = exporter(name).export(request)
            found += check_files(done) + check_operators(request, done)
            found += differences(request, done, READERS[name](done, request))
    return found


def exporters() -> None:
    conforming = 0
    for name in EXPORTERS:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                problems = problems_of(name)
        except MissingDependencyError as error:
            print(f"  {name:20} not read: {error.what}")
            continue
        conforming += not problems
        print(f"  {name:20} {'conforms' if not problems else problems[0]}")
    print(f"exporters conforming: {conforming} / {len(EXPORTERS)} ({len(POLICIES)} policies x {len(MODELS)} models)")


def report() -> None:
    records = make_records()
    for count in (50, 500):
        many = [replace(records[4], number=n, name=f"trial {n}", losses=tuple(range(100))) for n in range(count)]
        start = time.process_time()
        size = len(html_report(make_result(records), [*records, *many]).encode())
        print(
            f"report.html of {count} trials: {size / 1e6:.2f} MB in {1000 * (time.process_time() - start):.0f} ms CPU"
        )


def track(uri: str | None) -> tuple[float, float]:
    """Return (seconds that the search waits, of them per trial in appending)."""
    with tempfile.TemporaryDirectory() as folder:
        records = make_records() * 10
        start = time.monotonic()
        tracker = Tracker.open(Path(folder) / "study", study="benchmark", tracking_uri=uri)
        tracker.study_started({})
        before = time.monotonic()
        for record in records:
            tracker.trial(record)
        each = (time.monotonic() - before) / len(records)
        tracker.finished(make_result(records[:8]))
        tracker.close()
        seconds = time.monotonic() - start
        time.sleep(0.5)
    return seconds, each


def tracking() -> None:
    with socket.socket() as silent, socket.socket() as closed:
        silent.bind(("127.0.0.1", 0))
        silent.listen(16)
        closed.bind(("127.0.0.1", 0))
        for what, port in (("dead", closed.getsockname()[1]), ("silent", silent.getsockname()[1])):
            seconds, each = track(f"http://127.0.0.1:{port}")
            print(f"{what} server, 80 trials: {seconds:.2f} s in total, {1000 * each:.1f} ms per trial")


if __name__ == "__main__":
    exporters()
    report()
    tracking()
