"""A process that waits at its first training forward until it is told its trial."""

from __future__ import annotations

import threading
import time
from pathlib import Path

from autoprec.trial.driver.spare import Spare
from autoprec.trial.inside.spare import await_order
from autoprec.trial.progress import starting_file
from autoprec.trial.protocol import TrialSpec


def test_it_says_that_it_has_arrived_and_then_waits_for_its_trial(tmp_path: Path) -> None:
    order, got = tmp_path / "next.order", list[tuple[TrialSpec, float]]()
    starting_file(order).touch()
    inside = threading.Thread(target=lambda: got.append(await_order(order)), daemon=True)
    inside.start()
    while starting_file(order).exists():
        time.sleep(0.01)
    assert not got
    spec = TrialSpec(steps=7, policy={"schema": "autoprec.policy/1"})
    Spare(None, tmp_path / "next.json", order, 0.0).tell(spec, 12.5)  # type: ignore[arg-type]
    inside.join(20.0)
    assert got == [(spec, 12.5)]
