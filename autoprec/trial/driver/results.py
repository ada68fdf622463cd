"""What a trial wrote about itself, of one process or of all ranks."""

from __future__ import annotations

import contextlib
import json
import math
import os
from dataclasses import replace
from pathlib import Path

from autoprec.support.living import uncollected
from autoprec.trial.protocol import TrialResult


@uncollected()
def load_result(path: Path) -> TrialResult | None:
    """Return what a trial wrote, and remove it; None where it is not there, or not whole."""
    try:
        return TrialResult.from_json(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, KeyError, ValueError, TypeError):
        return None
    finally:
        with contextlib.suppress(OSError):
            os.unlink(path)


def over_ranks(path: Path) -> TrialResult | None:
    """Return what the first rank wrote, with losses averaged over all ranks, and the memory of the fullest one.

    Where the first rank wrote nothing, another may know why.
    """
    first = load_result(path)
    others = [found for file in sorted(path.parent.glob(f"{path.name}.rank*")) if (found := load_result(file))]
    if first is None:
        return next((found for found in others if not found.ok), None)
    alike = [first, *(found for found in others if found.ok and len(found.losses) == len(first.losses))]
    if not first.ok or len(alike) == 1:
        return first
    fullest = max(found.memory_bytes for found in alike)
    # a stage of a pipeline may see no loss at all
    losses = [found.losses for found in alike if not all(map(math.isnan, found.losses))] or [first.losses]
    means = tuple(math.fsum(step) / len(step) for step in zip(*losses, strict=True))
    return replace(first, losses=means, memory_bytes=fullest)
