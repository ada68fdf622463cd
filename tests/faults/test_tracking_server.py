"""A tracking server that fails, or trickles, through a whole search costs it nothing and loses nothing."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

from autoprec.tracking.beside import TrackingListener
from tests.faults.servers import serving
from tests.tracking.conftest import make_records, make_study
from tests.tracking.test_beside import INFO

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("kind", ["failing", "trickling"])
def test_a_bad_server_costs_less_than_two_seconds(kind: str, tmp_path: Path) -> None:
    """A dead and a silent server are in tests/tracking/test_beside.py, sending later is in test_log.py."""
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
        process = listener._process
        assert process is not None
        process.kill()  # it would go on trying for a while
        process.wait()
    assert seconds < 2.0
    assert len(folder.records()) == len(records)
    assert folder.status(running=False) == "KILLED"
