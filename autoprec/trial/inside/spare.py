"""The inside of :mod:`autoprec.trial.driver.spare`: waits at its first training forward until it is given a trial."""

from __future__ import annotations

import json
import time
from pathlib import Path

from autoprec.trial.progress import starting_file
from autoprec.trial.protocol import TrialSpec

#: Seconds between two looks.
_LOOK_S = 0.01


def await_order(order: Path) -> tuple[TrialSpec, float]:
    """Tell that this process has arrived, wait, and return what it is to run and when that was asked for.

    It needs no limit: a process whose driver is gone ends by itself.
    """
    starting_file(order).unlink(missing_ok=True)
    while not order.exists():
        time.sleep(_LOOK_S)
    document = json.loads(order.read_text(encoding="utf-8"))
    return TrialSpec.from_json(document["spec"]), float(document["asked"])
