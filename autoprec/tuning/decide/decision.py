"""The decision over the finalists: which policy is adopted, or why the script should stay as it is.

Rules, in this order (docs/concepts.md, "How it is decided"):

1. A candidate is *acceptable* when the upper 95 % confidence bound of its mean divergence over the paired seeds is
   within ``max_divergence``, when its gradient error is within the limit, and when it fits into memory. Where the loss
   cannot judge it (the noise floor is above the budget, or nothing is learnt in these steps) other statistics decide
   (:mod:`~autoprec.tuning.decide.noise`), with a stricter limit of the gradient error, and the answer says so.
2. The best by the objective leads; candidates within the timing noise of it are tied with it, except that nothing
   slower than the best acceptable preset is ever taken.
3. Among the tied the smallest gradient error wins (safety is free there), then the smaller memory, then a preset.
4. It is adopted when it beats the script beyond the timing noise; otherwise the answer is "stay".
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from autoprec.support.units import memory_text
from autoprec.tuning.decide.noise import (
    BLIND_GRADIENT_ERROR,
    Baseline,
    blindness,
    compare_excess,
    compare_gaps,
    confidence_bound,
    is_worse_than_benign,
)

#: Divergences below this share of the limit are as good as nothing.
_NEGLIGIBLE = 0.02
#: A modelled gain below this is not a reason to change a script.
_LEAST_GAIN = 0.001
#: A measured gain below this is not worth a run that would make it surer.
_LEAST_TIMED = 0.01


@dataclass(frozen=True)
class Candidate:
    """A finalist as measured.

    Attributes:
        speedup: time of the script over its own (1.0 is the script).
        divergences: one per paired seed, fractions.
        excess: signed relative loss gaps, one per paired seed (positive: worse); empty when unknown.
        gradient_error: relative to the gradient's norm; None when unknown.
        memory_bytes: peak of a step; 0 when unknown.
        reference: it is the script as written (always acceptable).
        upper: 95 % bound of its mean divergence by everything measured, of its neighbours too; None where only its own
            seeds are known.
        tag: anything the caller wants back.
    """

    name: str
    speedup: float
    divergences: tuple[float, ...]
    excess: tuple[float, ...] = field(default=(), kw_only=True)
    gradient_error: float | None = None
    memory_bytes: float = 0.0
    preset: bool = False
    reference: bool = False
    upper: float | None = None
    tag: Any = None


@dataclass(frozen=True)
class Decision:
    """What was decided.

    ``index`` points into the candidates (None with ``stay`` when no candidate is the script); ``interval`` is the half
    width of the chosen one's two-sided 90 % interval of divergence; ``rejected`` says why others are not acceptable;
    ``caveat`` says why the loss could not judge it and what did instead, empty when it could; ``unsure`` is the
    candidate that a "stay" rejects for the timing noise alone: with more runs it may be adopted.
    """

    verdict: str
    index: int | None
    reason: str
    rejected: dict[str, str]
    interval: float = 0.0
    caveat: str = ""
    unsure: int | None = None


@dataclass(frozen=True, slots=True)
class Judgement:
    """Whether one candidate is acceptable.

    Attributes:
        mean: divergence over the paired seeds, a fraction; infinity where one of them was not measured to the end.
        upper: its upper 95 % bound.
        rejection: why it is not acceptable; empty when it is.
        caveat: why the loss could not judge it and what did instead; empty when it could.
        final: no further seed can change the rejection: it breaks a limit that is not that of the loss.
        by_loss: the rejection is what the loss says, whatever else there is.
    """

    mean: float
    upper: float
    rejection: str = ""
    caveat: str = ""
    final: bool = False
    by_loss: bool = False


def gradient_limit(noise: float | None, max_gradient_error: float = 0.12, *, blind: bool = False) -> float | None:
    """Return the largest relative gradient error that is allowed: a share of the mini-batch gradient noise.

    Below 0.1 of the noise harmless, from 0.35 always bad (200 steps of a character GPT, 30 configurations x 3 seeds).
    None (for no limit) when the noise is unknown. Where the loss is ``blind`` an absolute limit holds beside it.
    """
    known = noise is not None and math.isfinite(noise) and noise > 0
    limits = ([max_gradient_error * noise] if known and noise else []) + [BLIND_GRADIENT_ERROR] * blind
    return min(limits, default=None)


@dataclass(frozen=True, slots=True)
class Rules:
    """What a candidate has to keep to, and what its loss is compared with.

    Attributes:
        max_divergence: budget of the mean divergence, a fraction.
        max_gradient: from :func:`gradient_limit`.
        max_memory: bytes.
        gradient_noise: mini-batch gradient noise, in whose units gradient errors are told.
    """

    max_divergence: float = 0.0025
    baseline: Baseline = field(default_factory=Baseline)
    max_gradient: float | None = None
    max_memory: float | None = None
    gradient_noise: float | None = None

    @property
    def blind(self) -> str:
        """Why the loss cannot judge, empty when it can."""
        return blindness(self.max_divergence, self.baseline)

    @property
    def benign(self) -> tuple[float, ...]:
        return self.baseline.benign or (self.baseline.floor,)

    @property
    def gradient_limit(self) -> float | None:
        """The largest gradient error, the stricter one where the loss is blind."""
        known = [] if self.max_gradient is None else [self.max_gradient]
        return min(known + [BLIND_GRADIENT_ERROR] * bool(self.blind), default=None)

    def judge(self, c: Candidate) -> Judgement:
        """Say whether a candidate is acceptable, rule 1; the script as written always is."""
        if c.reference:
            return Judgement(math.inf, math.inf)
        mean, upper = confidence_bound(c.divergences, _NEGLIGIBLE * max(self.max_divergence, self.baseline.floor))
        if c.upper is not None:
            upper = max(mean, c.upper)
        limit = self._beyond_limits(c)
        lost = self._beyond_budget(c, mean, upper)
        caveat = "" if lost or limit else self._caveat(c, upper)
        return Judgement(mean, upper, lost or limit, caveat, bool(limit), bool(lost))

    def breaks(self, c: Candidate) -> bool:
        """Say whether a candidate breaks a limit by what was measured of it, however many seeds that are."""
        mean, _ = confidence_bound(c.divergences, _NEGLIGIBLE * max(self.max_divergence, self.baseline.floor))
        return bool(self._beyond_limits(c) or self._beyond_budget(c, mean, mean))

    def _beyond_budget(self, c: Candidate, mean: float, upper: float) -> str:
        """Return what the loss says against a candidate; empty for nothing."""
        if not math.isfinite(mean):
            return "it was not measured to the end in every seed"
        if upper <= self.max_divergence:
            return ""
        if self.baseline.reach <= self.max_divergence:
            return f"divergence {mean:.3%}, up to {upper:.3%} at 95 % confidence, is beyond {self.max_divergence:.3%}"
        # gaps of benign changes are beyond the budget as well
        if is_worse_than_benign(c.divergences, self.benign):
            ratio = compare_gaps(c.divergences, self.benign)[0]
            return f"divergence {mean:.3%} is {ratio:.1f} times that of rounding the weights once to bf16"
        excess, least = compare_excess(c.excess, self.baseline.benign_excess) if c.excess else (0.0, -math.inf)
        if least > self.max_divergence:
            return (
                f"its loss is {excess:.3%} higher than under benign changes, surely more than {self.max_divergence:.3%}"
            )
        return ""

    def _beyond_limits(self, c: Candidate) -> str:
        """Return which limit of gradient error or memory a candidate breaks, whatever its loss; empty for none."""
        if self.blind and c.gradient_error is None:
            return f"{self.blind}, and its gradient error is unknown"
        limit = self.gradient_limit
        if limit is not None and c.gradient_error is not None and c.gradient_error > limit:
            return beyond_gradient(c.gradient_error, limit, self.gradient_noise)
        if self.max_memory is not None and c.memory_bytes > self.max_memory:
            return f"memory {memory_text(c.memory_bytes)} is beyond {memory_text(self.max_memory)}"
        return ""

    def _caveat(self, c: Candidate, upper: float) -> str:
        """Return how an acceptable candidate was judged where the loss could not; empty where it could."""
        if not self.blind or (upper <= self.max_divergence and self.baseline.learnt):
            return ""
        within = f"is within {100 * (self.gradient_limit or 0.0):.3g} %"
        text = f"{self.blind}; its gradient error of {100 * (c.gradient_error or 0.0):.3g} % {within}"
        if self.baseline.reach > self.max_divergence:
            ratio = compare_gaps(c.divergences, self.benign)[0]
            text += f", and its gaps are {ratio:.1f} times those of such benign changes"
        return text


def choose(
    candidates: Sequence[Candidate],
    rules: Rules,
    *,
    objective: str = "throughput",
    timing_noise: float = 0.01,
    reference_memory: float = 0.0,
    sixteen_bit: float | None = None,
) -> Decision:
    """Decide over the finalists; see the module's docstring for the rules.

    Args:
        candidates: the finalists, presets among them; the script as written may be one.
        objective: ``throughput``, ``memory`` or ``balanced``.
        timing_noise: relative noise of a speed-up (0 for modelled times).
        reference_memory: bytes of the script as written, for the memory objectives.
        sixteen_bit: speed-up of the best 16-bit run, which a gain is told against; None on a CPU.
    """
    judged = [rules.judge(c) for c in candidates]
    rejected = {c.name: j.rejection for c, j in zip(candidates, judged, strict=True) if j.rejection}
    script = next((i for i, c in enumerate(candidates) if c.reference), None)
    accepted = [i for i, c in enumerate(candidates) if not c.reference and c.name not in rejected]
    if not accepted:
        first = next((f": {name}: {why}" for name, why in rejected.items()), "")
        more = f" (and {len(rejected) - 1} more)" if len(rejected) > 1 else ""
        return Decision("stay", script, f"no policy that was measured is acceptable{first}{more}", rejected)
    merit = {i: _merit(candidates[i], objective, reference_memory) for i in accepted}
    leader = max(accepted, key=lambda i: merit[i])
    if merit[leader] <= 1.0 + max(timing_noise, _LEAST_GAIN if objective == "throughput" else 0.0):
        why = _no_gain(candidates[leader].name, merit[leader], timing_noise)
        unsure = leader if 1.0 + _LEAST_TIMED < merit[leader] <= 1.0 + timing_noise else None
        return Decision("stay", script, why, rejected, unsure=unsure)
    best_preset = max((merit[i] for i in accepted if candidates[i].preset), default=0.0)
    least = max(merit[leader] * (1.0 - timing_noise), best_preset)
    tied = [i for i in accepted if merit[i] >= least]
    chosen = min(tied, key=lambda i: _safety(candidates[i], merit[i]))
    best, found = candidates[chosen], judged[chosen]
    what = {"throughput": "fastest", "memory": "smallest", "balanced": "best balance of speed and memory"}[objective]
    gain = f"{best.speedup:.2f}x"
    if sixteen_bit:
        gain = f"{best.speedup / sixteen_bit:.2f}x over 16-bit ({gain} over the script as written)"
    reason = f"{best.name} is the {what} acceptable policy: {gain}, divergence {found.mean:.3%}"
    reason += f"; {found.caveat}" if found.caveat else f" within {rules.max_divergence:.3%}"
    if objective != "throughput":
        reason += f", merit {merit[chosen]:.2f}"
    if len(tied) > 1:
        reason += f"; of {len(tied)} within the timing noise it has the smallest gradient error"
    return Decision("adopt", chosen, reason, rejected, found.upper - found.mean, found.caveat)


def _merit(candidate: Candidate, objective: str, reference_memory: float) -> float:
    saved = reference_memory / candidate.memory_bytes if candidate.memory_bytes > 0 and reference_memory > 0 else 1.0
    if objective == "memory":
        return saved
    return math.sqrt(candidate.speedup * saved) if objective == "balanced" else candidate.speedup


def told_error(error: float, noise: float | None) -> str:
    """Return a gradient error in percent of the gradient and in units of its noise, where that is known."""
    return f"{100 * error:.3g} %" + (f" ({error / noise:.2g} of the noise)" if noise else "")


def beyond_gradient(error: float, limit: float, noise: float | None) -> str:
    """Say that a gradient error is beyond its limit, in percent of the gradient and in units of its noise."""
    text = f"gradient error {_apart(100 * error, 100 * limit, ' %')} of the gradient"
    return f"{text} ({_apart(error / noise, limit / noise)} of its noise)" if noise else text


def _apart(value: float, limit: float, unit: str = "") -> str:
    """Return ``value is beyond limit`` with as many digits as tell them apart."""
    digits = next((d for d in range(2, 6) if f"{value:.{d}g}" != f"{limit:.{d}g}"), 6)
    told = (f"{float(f'{x:.{digits}g}'):g}{unit}" for x in (value, limit))  # 360, not 3.6e+02
    return " is beyond ".join(told)


def _no_gain(name: str, merit: float, timing_noise: float) -> str:
    """Say why the best acceptable policy is not adopted: it is slower, or its gain cannot be told from noise."""
    best = f"the best acceptable policy ({name})"
    if merit < 1.0 - timing_noise:
        return f"{best} is not better than the script as written: {merit:.2f}x"
    if timing_noise < _LEAST_GAIN:
        return f"{best} changes nothing that counts: {merit - 1.0:+.2%} modelled"
    return f"{best} gains {merit - 1.0:+.1%}, which is within the timing noise of {timing_noise:.1%}"


def _safety(candidate: Candidate, merit: float) -> tuple[float, float, bool, float]:
    """Order tied candidates: gradient error (or divergence where it is unknown), memory, presets first, then merit."""
    error = candidate.gradient_error
    if error is None:
        error = float(np.mean(candidate.divergences))
    return (error, candidate.memory_bytes, not candidate.preset, -merit)


def faster_ones(
    chosen: Candidate,
    tried: Sequence[tuple[Candidate, Judgement]],
    rules: Rules,
    rejected: Mapping[str, str],
    *,
    fewest: int,
    timing_noise: float,
) -> dict[str, str]:
    """Return why each policy that was measured to be faster than the chosen one was not taken, the fastest first.

    Args:
        tried: everything that was, and what is said of it.
        rejected: why finalists are not acceptable, by name.
        fewest: paired seeds that it takes to be accepted.
        timing_noise: relative difference that two measured speed-ups have by chance; 0 where they are modelled.
    """
    found = [(c, j) for c, j in tried if c.name != chosen.name and round(c.speedup, 2) > round(chosen.speedup, 2)]
    found.sort(key=lambda pair: -pair[0].speedup)
    out = {}
    for c, judged in found:
        within = c.speedup <= chosen.speedup * (1.0 + timing_noise)
        why = rejected.get(c.name) or _why_not(c, judged, rules, fewest)
        if why and within:
            why += f"; it is faster by no more than the timing noise of {timing_noise:.1%}"
        elif within:
            why = f"it is faster by no more than the timing noise of {timing_noise:.1%}, and adds no smaller error"
        if why:
            out[c.name] = why
    return out


def _why_not(c: Candidate, judged: Judgement, rules: Rules, fewest: int) -> str:
    """Return why a candidate is not acceptable so far; empty where it is."""
    seeds = len(c.divergences)
    if judged.rejection and (seeds >= fewest or not rules.blind or rules.breaks(c)):
        return judged.rejection
    return f"it was measured under {seeds} of the {fewest} paired seeds that it takes" if seeds < fewest else ""


def told_faster(reasons: Mapping[str, str], candidates: Sequence[Candidate], sixteen_bit: float | None) -> str:
    """Return what to add to a reason about the fastest of :func:`faster_ones`; empty where there is none.

    Args:
        reasons: by name, the fastest first.
        sixteen_bit: speed-up of the best 16-bit run, which gains are told against; None on a CPU.
    """
    name: str | None = next(iter(reasons), None)
    if name is None:
        return ""
    speedup = next(c.speedup for c in candidates if c.name == name)
    gain = f"{speedup / (sixteen_bit or 1.0):.2f}x{' over 16-bit' if sixteen_bit else ''}"
    more = f" ({len(reasons) - 1} more are faster and were not taken: see the notes)" if len(reasons) > 1 else ""
    return f"; {name} was measured as {gain}, but is not taken: {reasons[name]}{more}"
