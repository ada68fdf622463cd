"""The decision over the finalists: which policy is adopted, or why the script should stay as it is.

Rules, in this order (DESIGN section 5, point 7):

1. A candidate is *acceptable* when the upper 95 % confidence bound of its mean divergence over the paired seeds is
   within ``max_divergence``, or within what rounding the weights once to bf16 does to this training run (the noise
   floor: nobody can measure less); when its gradient error is within the limit; and when it fits into memory.
2. The best by the objective leads; candidates within the timing noise of it are tied with it, except that nothing
   slower than the best acceptable preset is ever taken.
3. Among the tied the smallest gradient error wins (safety is free there), then the smaller memory.
4. It is adopted when it beats the script beyond the timing noise; otherwise the answer is "stay".

How far up may the mean of a few seeds be? The divergence of one policy varies from seed to seed like a lognormal
variable: its logarithm has a standard deviation of 0.3 to 0.5, about the same for all policies of one script at one
level (benchmarks/search_quality.py). Four seeds say little about that spread, and four that happen to lie close
together promise far too much when the bound is Student's t on each policy's own four. So the spread is taken from all
finalists at the same level and from what is known beforehand, unless a policy's own is larger; the bound is Cox's for
the mean of a lognormal variable (Zhou and Gao, Statistics in Medicine 16, 1997), with Student's t for the degrees of
freedom of the pooled spread.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["Candidate", "Decision", "choose", "confidence_bounds", "gradient_limit", "noise_limit"]

Vector = npt.NDArray[np.float64]
#: Divergences below this share of the limit are as good as nothing.
_NEGLIGIBLE = 0.02
#: A modelled gain below this is not a reason to change a script.
_LEAST_GAIN = 0.001
#: One-sided 95 % quantiles of Student's t by degrees of freedom.
_T95 = (
    6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833, 1.812, 1.796, 1.782, 1.771, 1.761, 1.753,
    1.746, 1.740, 1.734, 1.729, 1.725, 1.721, 1.717, 1.714, 1.711, 1.708, 1.706, 1.703, 1.701, 1.699, 1.697,
)  # fmt: skip
#: Standard deviation of ln(divergence) known beforehand, and how many degrees of freedom that counts for.
_PRIOR_SD, _PRIOR_DF = 0.4, 4
#: Degrees of freedom that others lend at most, the factor of level within which they are like this one, and the
#: standard deviation from which on one of them has heavy tails of its own (it lends no more than this).
_MOST_LENT, _LIKE, _WIDEST_LENT = 12, 3.0, 0.6


@dataclass(frozen=True)
class Candidate:
    """A finalist as measured.

    Attributes:
        name: what a person calls it.
        speedup: time of the script over its own (1.0 is the script).
        divergences: one per paired seed, fractions.
        gradient_error: relative to the gradient's norm; None when unknown.
        memory_bytes: peak of a step; 0 when unknown.
        preset: it is one of the presets.
        reference: it is the script as written (always acceptable).
        tag: anything the caller wants back.
    """

    name: str
    speedup: float
    divergences: tuple[float, ...]
    gradient_error: float | None = None
    memory_bytes: float = 0.0
    preset: bool = False
    reference: bool = False
    tag: Any = None


@dataclass(frozen=True)
class Decision:
    """What was decided.

    ``index`` points into the candidates (None with ``stay`` when no candidate is the script); ``interval`` is the half
    width of the chosen one's two-sided 90 % interval of divergence; ``rejected`` says why others are not acceptable;
    ``tied`` names those the chosen one could not be told apart from.
    """

    verdict: str
    index: int | None
    reason: str
    interval: float = 0.0
    rejected: dict[str, str] = field(default_factory=dict)
    tied: tuple[str, ...] = ()


def gradient_limit(noise: float | None, max_gradient_error: float = 0.12) -> float | None:
    """Return the largest relative gradient error that is allowed: a share of the mini-batch gradient noise.

    Below 0.1 of the noise harmless, from 0.35 always bad (200 steps of a character GPT, 30 configurations x 3 seeds).
    None when the noise is unknown: then there is no such limit.
    """
    return None if noise is None or not math.isfinite(noise) or noise <= 0 else max_gradient_error * noise


def noise_limit(noise_floor: Sequence[float] | float) -> float:
    """Return the divergence that the benign perturbation itself reaches: the mean over its seeds."""
    values = [noise_floor] if isinstance(noise_floor, (int, float)) else list(noise_floor)
    finite = [v for v in values if math.isfinite(v)]
    return float(np.mean(finite)) if finite else 0.0


def confidence_bounds(rows: Sequence[Sequence[float]], negligible: float = 1e-7) -> list[tuple[float, float]]:
    """Return (mean, upper 95 % bound of the mean) of every row of divergences, one value per paired seed.

    Args:
        rows: divergences, fractions; a row that is empty or holds a value that is not finite has no bound (infinity).
        negligible: divergences below this count as this much: their logarithms say nothing.
    """
    usable = [len(row) > 0 and bool(np.isfinite(row).all()) for row in rows]
    logs = [
        np.log(np.maximum(np.asarray(row, dtype=np.float64), negligible)) if good else np.zeros(0)
        for row, good in zip(rows, usable, strict=True)
    ]
    out = []
    for k, row in enumerate(rows):
        if not usable[k]:
            out.append((math.inf, math.inf))
            continue
        mean = float(np.mean(row))
        others = [log for j, log in enumerate(logs) if j != k and _alike(log, logs[k])]
        out.append((mean, max(mean, _cox(logs[k], *_lent(others)))))
    return out


def _alike(one: Vector, other: Vector) -> bool:
    return len(one) > 1 and abs(float(one.mean() - other.mean())) <= math.log(_LIKE)


def _lent(others: Sequence[Vector]) -> tuple[float, int]:
    """Return (variance, degrees of freedom) that is known before a policy's own seeds."""
    freedom = _PRIOR_DF + sum(len(log) - 1 for log in others)
    squares = _PRIOR_DF * _PRIOR_SD**2
    squares += sum((len(log) - 1) * min(float(log.var(ddof=1)), _WIDEST_LENT**2) for log in others)
    return squares / freedom, min(_MOST_LENT, freedom)


def _cox(logs: Vector, lent: float, freedom: int) -> float:
    count = len(logs)
    total = freedom + count - 1
    squares = float(((logs - logs.mean()) ** 2).sum())
    # a spread far above everybody's is not chance: FP8 may be harmless under most seeds and ten times as bad under one
    variance = max((freedom * lent + squares) / total, squares / max(count - 1, 1))
    error = math.sqrt(variance / count + variance**2 / (2 * (total + 2)))
    return math.exp(float(logs.mean()) + variance / 2 + _T95[min(total, len(_T95)) - 1] * error)


def _rejection(
    c: Candidate, bound: tuple[float, float], limit: float, max_gradient: float | None, max_memory: float | None
) -> str:
    """Return why a candidate is not acceptable; empty when it is."""
    mean, upper = bound
    if not math.isfinite(mean):
        return "it was not measured to the end in every seed"
    if upper > limit:
        return f"divergence {mean:.3%}, up to {upper:.3%} at 95 % confidence, is beyond {limit:.3%}"
    if max_gradient is not None and c.gradient_error is not None and c.gradient_error > max_gradient:
        return f"gradient error {c.gradient_error:.3g} is beyond {max_gradient:.3g}"
    if max_memory is not None and c.memory_bytes > max_memory:
        return f"memory {c.memory_bytes / 1e9:.2f} GB is beyond {max_memory / 1e9:.2f} GB"
    return ""


def _merit(candidate: Candidate, objective: str, reference_memory: float) -> float:
    saved = reference_memory / candidate.memory_bytes if candidate.memory_bytes > 0 and reference_memory > 0 else 1.0
    if objective == "memory":
        return saved
    return math.sqrt(candidate.speedup * saved) if objective == "balanced" else candidate.speedup


def choose(
    candidates: Sequence[Candidate],
    *,
    max_divergence: float = 0.0025,
    noise_floor: Sequence[float] | float = 0.0,
    max_gradient: float | None = None,
    max_memory: float | None = None,
    objective: str = "throughput",
    timing_noise: float = 0.01,
    reference_memory: float = 0.0,
) -> Decision:
    """Decide over the finalists; see the module's docstring for the rules.

    Args:
        candidates: the finalists, presets among them; the script as written may be one.
        max_divergence: budget of the mean divergence, a fraction.
        noise_floor: divergence of the benign perturbation, one number or one per seed.
        max_gradient: from :func:`gradient_limit`.
        max_memory: bytes.
        objective: ``throughput``, ``memory`` or ``balanced``.
        timing_noise: relative noise of a speed-up (0 for modelled times).
        reference_memory: bytes of the script as written, for the memory objectives.
    """
    floor = noise_limit(noise_floor)
    limit = max(max_divergence, floor)
    bounds = confidence_bounds([() if c.reference else c.divergences for c in candidates], _NEGLIGIBLE * limit)
    rejected = {
        c.name: why
        for c, bound in zip(candidates, bounds, strict=True)
        if not c.reference and (why := _rejection(c, bound, limit, max_gradient, max_memory))
    }
    script = next((i for i, c in enumerate(candidates) if c.reference), None)
    accepted = [i for i, c in enumerate(candidates) if not c.reference and c.name not in rejected]
    if not accepted:
        why = f": {_closest(rejected)}" if rejected else ""
        return Decision("stay", script, f"no policy that was measured is acceptable{why}", 0.0, rejected)
    merit = {i: _merit(candidates[i], objective, reference_memory) for i in accepted}
    leader = max(accepted, key=lambda i: merit[i])
    if merit[leader] <= 1.0 + timing_noise or (objective == "throughput" and merit[leader] < 1.0 + _LEAST_GAIN):
        gain = merit[leader] - 1.0
        reason = (
            f"the best acceptable policy ({candidates[leader].name}) gains {gain:+.1%}, "
            f"which is within the timing noise of {timing_noise:.1%}"
        )
        return Decision("stay", script, reason, 0.0, rejected)
    best_preset = max((merit[i] for i in accepted if candidates[i].preset), default=0.0)
    least = max(merit[leader] * (1.0 - timing_noise), min(best_preset, merit[leader]))
    tied = [i for i in accepted if merit[i] >= least]
    chosen = min(tied, key=lambda i: _safety(candidates[i], merit[i]))
    mean, upper = bounds[chosen]
    others = tuple(candidates[i].name for i in tied if i != chosen)
    reason = _reason(candidates[chosen], objective, merit[chosen], mean, limit, floor, max_divergence, others)
    return Decision("adopt", chosen, reason, upper - mean, rejected, others)


def _safety(candidate: Candidate, merit: float) -> tuple[float, float, float]:
    """Order tied candidates: gradient error (or divergence where it is unknown), memory, then merit."""
    error = candidate.gradient_error
    if error is None:
        error = float(np.mean(candidate.divergences))
    return (error, candidate.memory_bytes, -merit)


def _closest(rejected: dict[str, str]) -> str:
    name = next(iter(rejected))
    return f"{name}: {rejected[name]}" + (f" (and {len(rejected) - 1} more)" if len(rejected) > 1 else "")


def _reason(
    chosen: Candidate,
    objective: str,
    merit: float,
    mean: float,
    limit: float,
    floor: float,
    budget: float,
    tied: Sequence[str],
) -> str:
    what = {"throughput": "fastest", "memory": "smallest", "balanced": "best balance of speed and memory"}[objective]
    against = f"the noise floor of {floor:.3%}" if limit > budget else f"{budget:.3%}"
    text = (
        f"{chosen.name} is the {what} acceptable policy: {chosen.speedup:.2f}x, divergence {mean:.3%} within {against}"
    )
    if objective != "throughput":
        text += f", merit {merit:.2f}"
    if tied:
        text += f"; of {len(tied) + 1} within the timing noise it has the smallest gradient error"
    return text
