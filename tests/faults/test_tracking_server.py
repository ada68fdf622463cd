"""A tracking server that fails, or trickles, through a whole search costs it nothing and loses nothing."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

from autoprec.tracking.listener import TrackingListener
from tests.faults.servers import serving
from tests.tracking.conftest import make_records, make_study
from tests.tracking.test_listener import INFO

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("kind", ["failing", "trickling"])
def test_a_bad_server_costs_less_than_two_seconds(kind: str, tmp_path: Path) -> None:
    """A dead and a silent server are in tests/tracking/test_listener.py, sending later is in test_log.py."""
    records = make_records()
    folder = make_study(tmp_path / "demo", records)
    with serving(kind) as uri:
        began = time.monotonic()
        listener = TrackingListener(tmp_path, tracking_uri=uri)
        listener.started(replace(INFO, study_dir=str(folder.path)))
        for record in records:
            listener.trial(record, 1, 3, None, 0.0)
        listener.close()
        seconds = time.monotonic() - began
    assert seconds < 2.0
    assert len(folder.records()) == len(records)
    assert folder.status(running=False) == "KILLED"
