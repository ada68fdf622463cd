"""When a search is paid back by the steps that it made faster."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

#: Training steps of a search as it is by default, at most: 30 trials of 23 steps, two policies and the reference under
#: three further paired seeds, 60 probes.
_SEARCH_STEPS = 30 * 23 + 3 * 3 * 23 + 60


#: Hardly a run is longer: what is paid back later never is.
HORIZON_STEPS = 10_000_000


@dataclass(frozen=True, slots=True)
class Payback:
    """After how many training steps a search has paid for itself; infinite beyond :data:`HORIZON_STEPS`."""

    search_s: float
    saved_ms_per_step: float
    steps: float
    hours: float

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form; never is written as null."""
        out = asdict(self)
        return {key: None if value == float("inf") else value for key, value in out.items()}


def payback(step_ms: float, speedup: float, over_script: float = math.inf) -> Payback:
    """Return when a search on the target is paid back by steps that are ``speedup`` times faster.

    Args:
        step_ms, speedup: of the baseline, and how many times faster the policy is.
        over_script: the same over the script as written: who does not search runs the faster of the two.
    """
    if over_script < speedup:
        step_ms, speedup = step_ms * over_script / speedup, over_script
    cost = _SEARCH_STEPS * step_ms / 1e3
    faster = step_ms / max(speedup, 1e-9)
    saved = step_ms - faster
    steps = cost * 1e3 / saved if saved > 1e-9 else float("inf")
    steps = steps if steps <= HORIZON_STEPS else float("inf")
    return Payback(cost, max(0.0, saved), steps, steps * faster / 3.6e6)
