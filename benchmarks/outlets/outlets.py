"""Outlets: exports under the real libraries, size of the report, cost of tracking (also with dead and silent servers).

python benchmarks/outlets/outlets.py [--only exports|report|tracking] [--targets torchao,accelerate] [--why]
"""

import argparse
import socket
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from autoprec.report.html import html_report
from autoprec.tracking.listener import TrackingListener
from tests.tracking.conftest import make_records, make_result, make_study
from tests.tracking.test_listener import INFO


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
    """Return (seconds that the search waits, of them per trial in saying that there is one)."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        records = make_records()
        folder = make_study(Path(scratch) / "demo", records)
        start = time.monotonic()
        listener = TrackingListener(scratch, tracking_uri=uri)
        listener.started(replace(INFO, study_dir=str(folder.path)))
        before = time.monotonic()
        for record in records * 10:
            listener.trial(record, 1, 1, None, 0.0)
        each = (time.monotonic() - before) / (10 * len(records))
        listener.attach(make_result(records), folder.path)
        listener.close()
        return time.monotonic() - start, each


def tracking() -> None:
    with socket.socket() as silent, socket.socket() as closed:
        silent.bind(("127.0.0.1", 0))
        silent.listen(16)
        closed.bind(("127.0.0.1", 0))
        for what, port in (("dead", closed.getsockname()[1]), ("silent", silent.getsockname()[1])):
            seconds, each = track(f"http://127.0.0.1:{port}")
            print(f"{what} server, 80 trials: {seconds:.2f} s in total, {1000 * each:.1f} ms per trial")


def exports(targets: str, why: bool) -> None:
    from benchmarks.outlets import exports

    exports.main([name for name in targets.split(",") if name], why)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", choices=("exports", "report", "tracking"))
    parser.add_argument("--targets", default="", help="exports: these alone, without the figures of all")
    parser.add_argument("--why", action="store_true", help="exports: where a target failed")
    given = parser.parse_args()
    if given.only in (None, "exports"):
        exports(given.targets, given.why)
    if given.only in (None, "report"):
        report()
    if given.only in (None, "tracking"):
        tracking()
