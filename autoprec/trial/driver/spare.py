"""The process of a trial that is not known yet: started while another trial compiles, and given its trial later.

Until its first training forward a trial is the script and nothing else, whatever its policy. So that part of the next
trial (data, the model, the device's own start) needs no time of its own: the process stops there
(:mod:`autoprec.trial.inside.spare`) and waits. While it starts, a file is there; the trial beside it is timed only when
that is gone.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from autoprec.trial.driver.process_tree import ProcessTree
from autoprec.trial.progress import starting_file
from autoprec.trial.protocol import TrialSpec


@dataclass(slots=True)
class Spare:
    """A process that waits for its trial.

    Attributes:
        process: the script, on its way to its first training forward or there.
        result: where the trial writes its result.
        order: where it looks for what to run.
        until: when it must have arrived (``time.monotonic``).
    """

    process: ProcessTree
    result: Path
    order: Path
    until: float

    def look(self) -> bool:
        """Say whether it is of use; one that has ended, or does not arrive, is ended, so that nothing waits for it."""
        late = time.monotonic() > self.until and starting_file(self.order).exists()
        if not late and self.process.poll() is None:
            return True
        self.end()
        return False

    def tell(self, spec: TrialSpec, asked: float) -> None:
        """Let it run a trial that was asked for at a time of ``time.monotonic``."""
        written = self.order.with_suffix(".tmp")
        written.write_text(json.dumps({"spec": spec.to_json(), "asked": asked}), encoding="utf-8")
        os.replace(written, self.order)

    def end(self) -> None:
        """End it, and the wait for it."""
        self.process.end()
        starting_file(self.order).unlink(missing_ok=True)


def start_spare(result: Path, launch: Callable[..., ProcessTree], patience_s: float) -> Spare:
    """Start a process that waits for its trial.

    Args:
        result: where that will write its result.
        launch: starts the script, given ``result`` and, as ``order``, where it looks for what to run.
        patience_s: seconds it may take until its first training forward.
    """
    order = result.with_suffix(".order")
    starting_file(order).touch()  # before it runs: the trial beside it must not be timed before it has seen this
    try:
        return Spare(launch(result, order=str(order)), result, order, time.monotonic() + patience_s)
    except BaseException:
        starting_file(order).unlink()
        raise
