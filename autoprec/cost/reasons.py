"""Why a layer, or a whole model, stays as it is: the true cause, from the figures that decided it.

"The GEMMs are too small" is one cause of many. A CPU without bf16 instructions loses at every size; an 8-bit recipe is
emulated there, not run; a device may not multiply the format at all; a step may hold few GEMMs, or run them in the
asked precision already. A user who is told the wrong one buys the wrong fix.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autoprec.cost.kernels import LayerCost
from autoprec.cost.model import CostModel
from autoprec.precision.hardware import cpu_bf16_units
from autoprec.precision.recipes import AS_WRITTEN, BUILTIN_RECIPES

#: Choices whose modelled times differ by less are the same precision under two names.
SAME_PRECISION = 0.01
#: A GEMM of full size gains 30 % or more from 8 bits; one that gains less than half of that is held back by its size.
_WORTH_IT = 0.15
#: M K N of a product on a CPU from which on a ratio of its times is told: what is smaller takes what a call takes, in
#: any format.
_TIMED_SIZE = 2**21


@dataclass(frozen=True, slots=True)
class Rival:
    """A choice that a layer could take in place of the baseline: what it costs, and whether it quantises."""

    choice: str
    cost: LayerCost
    quantised: bool


def blocked_reason(model: CostModel, name: str, refused: Mapping[str, str]) -> str:
    """Return why a layer has no quantised choice: the device, its sizes, or the space (which drops what cannot run).

    Args:
        model: of the step.
        name: of the layer.
        refused: choice -> why the target cannot run it.
    """
    if refused:
        return next(iter(refused.values()))
    ok, reason = model.can_run(name, BUILTIN_RECIPES["fp8_tensorwise"])
    return "the search space offers it no quantised choice" if ok else reason


def _time(seconds: float) -> str:
    return f"{seconds * 1e6:.3g} us" if seconds < 1e-3 else f"{seconds * 1e3:.3g} ms"


def layer_reason(base: LayerCost, rivals: list[Rival], *, cpu: bool) -> str:
    """Return why no choice gains on one layer, by the rival that comes nearest (a quantised one on a GPU).

    Args:
        base: the layer in the baseline.
        rivals: the layer under each choice.
        cpu: whether the target is a CPU, whose 16-bit choices count.
    """
    quantised = [] if cpu else [rival for rival in rivals if rival.quantised]
    nearest = min(quantised or rivals, key=lambda rival: rival.cost.seconds, default=None)
    ratio = nearest.cost.seconds / base.seconds if nearest is not None and base.seconds else 1.0
    if nearest is None or (not nearest.quantised and abs(ratio - 1.0) < SAME_PRECISION):
        return "runs in the precision that the choices would give already"
    if not nearest.quantised:
        return f"no choice is faster: {nearest.choice} takes {ratio:.2f}x"
    if cpu:
        return f"no choice is faster: {nearest.choice} is emulated on a CPU and takes {ratio:.2f}x"
    saved, spent = base.gemm - nearest.cost.gemm, nearest.cost.cast - base.cast
    takes = f"below break-even: {nearest.choice} takes {ratio:.2f}x"
    if saved <= 0.05 * base.gemm:
        return f"{takes}: memory traffic and launches bound GEMMs of this size, so 8 bits multiply no faster"
    return f"{takes}: its GEMMs save {_time(saved)}, its casts cost {_time(spent)}"


def time_shares(shares: Mapping[str, float]) -> str:
    """Return what the layers' GEMMs and casts, and where they are waited for the launches, take of a step."""
    launches = f", launches {shares['launch']:.0%}" if shares.get("launch") else ""
    return f"layers that may change take {shares['tunable']:.0%} of the step{launches}"


def _slowdown(rows: list[dict[str, Any]], choice: str) -> float:
    """Return how many times the baseline's time the layers take under a choice; 0 where none was offered it.

    Small products say nothing of a format, and are left out. Each layer counts by the time that it takes as written.
    """
    asked = [row for row in rows if choice in row["times_ms"] and _size(row) >= _TIMED_SIZE]
    base = sum(row["baseline_ms"] for row in asked)
    return sum(row["times_ms"][choice] for row in asked) / base if base else 0.0


def _size(row: dict[str, Any]) -> float:
    return max(map(math.prod, row["shapes"]), default=0.0)


def _largest(rows: list[dict[str, Any]]) -> str:
    m, k, n = max((shape for row in rows for shape in row["shapes"]), key=math.prod, default=(0, 0, 0))
    return f"(the largest: M {m:.0f}, K {k:.0f}, N {n:.0f})"


def _on_the_cpu(rows: list[dict[str, Any]], baseline: str, shares: Mapping[str, float], script: str) -> str:
    """Return why nothing gains on this machine's CPU, and what to do about it."""
    choices = dict.fromkeys(choice for row in rows for choice in row["times_ms"] if choice != baseline)
    slower = {choice: ratio for choice in choices if (ratio := _slowdown(rows, choice)) > 1.0 + SAME_PRECISION}
    rehearse = f"nothing to gain on it; to rehearse for a GPU: autoprec search --target h100 {script}"
    if not slower and all(_size(row) < _TIMED_SIZE for row in rows):
        return f"the GEMMs {_largest(rows)} take what a call takes, in any precision; {rehearse}"
    if "bf16" in slower:
        if cpu_bf16_units() == ():
            times = f"{slower['bf16']:.1f} times slower than fp32 here"
            return f"this CPU has no bf16 instructions (bf16 GEMMs are {times}); {rehearse}"
        times = f"{slower['bf16']:.1f} times slower in bf16 than in fp32 on this CPU, casts included"
        return f"the GEMMs {_largest(rows)} are {times}; {rehearse}"
    if slower and set(slower) == set(choices):
        nearest = min(slower, key=lambda choice: slower[choice])
        return f"no choice is faster on a CPU: {nearest} takes {slower[nearest]:.2f}x; {rehearse}"
    return f"too little of the step can change ({time_shares(shares)})"


def model_reason(
    rows: list[dict[str, Any]],
    baseline: str,
    shares: Mapping[str, float],
    *,
    cpu: bool,
    script: str = "SCRIPT",
    written: str = AS_WRITTEN,
) -> str:
    """Return why all choices together gain next to nothing.

    Args:
        rows: one per layer, as in :attr:`autoprec.cost.verdict.Verdict.rows`.
        shares: share of the baseline's step by category; ``tunable`` is what the layers take, casts included.
        cpu: the target is this machine's CPU.
        script: the command line of the script, for the command that is proposed.
        written: what the run without a policy is called.
    """
    if all(row["gain_ms"] > 0 for row in rows):
        best = max(row["gain"] for row in rows)
        return f"every layer gains, by {best:.0%} at most, but {time_shares(shares)}"
    times = [time / row["baseline_ms"] for row in rows if row["baseline_ms"] for time in row["times_ms"].values()]
    if times and all(abs(ratio - 1.0) < SAME_PRECISION for ratio in times):
        return f"{written} already runs its GEMMs in the precision that the choices would give; {time_shares(shares)}"
    if cpu:
        return _on_the_cpu(rows, baseline, shares, script)
    losing = [row for row in rows if row["gain_ms"] <= 0]
    blocked = [row for row in losing if row["blocked"]]
    counted = f"{len(losing) - len(blocked)} of {len(rows)} layers are below break-even"
    counted += f", {len(blocked)} without a quantised choice" if blocked else ""
    gaining = [row for row in rows if row["gain_ms"] > 0]
    asked = [row for row in losing if not row["blocked"]]  # what has no quantised choice pays for no cast
    if sum(row["baseline_ms"] for row in gaining) > sum(row["baseline_ms"] for row in asked):
        best = max(row["gain"] for row in gaining)
        if best > _WORTH_IT:
            return f"{counted}; the others gain by {best:.0%} at most, but {time_shares(shares)}"
        small = f"the other GEMMs {_largest(gaining)} are too small to gain more than {best:.0%}"
        return f"{counted}; {small}; {time_shares(shares)}"
    return f"{counted}: the GEMMs {_largest(asked or rows)} are too small to pay for casts; {time_shares(shares)}"
