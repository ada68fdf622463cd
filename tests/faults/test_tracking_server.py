"""A tracking server that fails, or trickles, through a whole search costs it nothing and loses nothing."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from autoprec.tracking.spool import Spool
from autoprec.tracking.tracker import Tracker
from tests.faults.servers import serving
from tests.tracking.conftest import make_records

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("kind", ["failing", "trickling"])
def test_a_bad_server_costs_less_than_two_seconds(kind: str, tmp_path: Path) -> None:
    """A dead and a silent server are in tests/tracking/test_tracker.py, as is sending later what was missed."""
    records = make_records()
    with serving(kind) as uri:
        began = time.monotonic()
        with Tracker.open(tmp_path / "study", study="demo", tracking_uri=uri) as tracker:
            tracker.study_started({})
            for record in records:
                tracker.trial(record)
        seconds = time.monotonic() - began
    assert seconds < 2.0
    kinds = [event["kind"] for event, _ in Spool.of(tmp_path / "study").read()]
    assert kinds.count("trial") == len(records)
    assert kinds[-1] == "end"
    print(f"{kind}: {seconds:.2f} s for {len(records)} trials, {len(records)} kept for `autoprec sync`")
