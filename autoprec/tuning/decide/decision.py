"""The decision over everything measured: which policy is adopted, or why the script should stay as it is.

The rules, in this order (docs/search.md, "The decision"):

1. A policy is *acceptable* when the upper 95 % confidence bound of its mean divergence over the paired seeds is within
   ``max_divergence``, when its gradient error is within the limit, and when it fits into memory. Where the loss
   cannot judge it (the noise floor is above the budget, or nothing is learnt in these steps) other statistics decide
   (:mod:`~autoprec.tuning.decide.noise`), with a stricter limit of the gradient error, and the answer says so.
2. The best by the objective leads. What is surely slower than another acceptable one is never taken: beyond both
   intervals where both were timed in a duel, else beyond the timing noise. The others are tied.
3. Among the tied the smallest gradient error wins (safety is free there), then the smaller memory, then a preset.
4. It is adopted when it beats the script beyond the timing noise; otherwise the answer is "stay", or "undecided" where
   the search was cut short (``phases/answer.py``).

Reasons are codes with data; :mod:`~autoprec.tuning.decide.sentences` has the words.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from autoprec.support.arrays import np
from autoprec.trial.losses import MISMATCH
from autoprec.tuning.decide.metrics import divergence, signed_gap
from autoprec.tuning.decide.noise import (
    UNINFORMATIVE_GRADIENT_ERROR,
    Baseline,
    compare_excess,
    compare_gaps,
    confidence_bound,
    is_worse_than_rounding,
    screening_limit,
    uninformative,
)
from autoprec.tuning.decide.sentences import Reason, sentence
from autoprec.tuning.study.run import DUEL, MODELLED, Metric, Run, pooled

#: Divergences below this share of the limit are as good as nothing.
_NEGLIGIBLE = 0.02
#: A modelled gain below this is not a reason to change a script.
_LEAST_GAIN = 0.001
#: Of policies that duels cannot tell apart, those that seem slower than the fastest by more than this are not tied.
_TIED = 0.03
#: Share of the script's mismatch of training and rollout that a policy of its speed has to take away under every seed.
_CLOSER = 0.1


@dataclass(frozen=True)
class Standing:
    """One policy over all its runs, and what the rules say of it.

    Attributes:
        speedup: time of the script over its own (1.0 is the script).
        divergences: one per paired seed, fractions; infinite where it was not measured to the end.
        excess: signed relative loss gaps, one per paired seed (positive: worse); empty when unknown.
        gradient_error: relative to the gradient's norm; None when unknown.
        memory_bytes: peak of a step; 0 when unknown.
        reference: it is the script as written (always acceptable).
        upper: 95 % bound of its mean divergence, by its neighbours' runs too; None where only its own seeds are known
            and it was not judged.
        run: the first of its runs.
        mean: divergence over the paired seeds; infinity where one of them was not measured to the end.
        rejection: why it is not acceptable; None when it is.
        caveat: why the loss could not judge it and what did instead; None when it could.
        final: no further seed can change the rejection: it breaks a limit that is not that of the loss.
        by_loss: the rejection is what the loss says, whatever else there is.
        low, high: 95 % interval of the speed-up, where it was timed in a duel; the model's bounds where ``modelled``.
        slowest: the least speed-up of its paired runs; infinity where none was timed.
        loss: the same policy by its losses, where runs are compared by the mismatch of training and rollout: two sides
            that are wrong alike are not apart; else None.
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
    run: Run | None = None
    mean: float = math.inf
    rejection: Reason | None = None
    caveat: Reason | None = None
    final: bool = False
    by_loss: bool = False
    low: float | None = None
    high: float | None = None
    modelled: bool = False
    slowest: float = math.inf
    loss: Standing | None = None

    @classmethod
    def of(cls, name: str, runs: Sequence[Run], gradient_error: float | None) -> Standing:
        """Return a policy over its runs, one per paired seed, and its duel, if any, that was not judged yet.

        A seed that failed is an infinite divergence: such a policy is never accepted.

        Args:
            name: the policy's name.
            runs: its runs, one per paired seed, and its duel.
            gradient_error: relative to the gradient's norm; None when unknown.
        """
        known, paired = pooled(runs, to_rank=True).get(name), [run for run in runs if run.kind != DUEL]
        speedup = Metric(0.0) if known is None else known.metrics["speedup"]
        loss = None
        if any(run.metric in MISMATCH for run in paired):
            curves = [(run.losses, run.reference_losses) if run.ok else None for run in paired]
            gaps = tuple(divergence(*both) if both else math.inf for both in curves)
            excess = tuple(signed_gap(*both) for both in curves if both)
            loss = cls(name, speedup.value, gaps, excess=excess, gradient_error=gradient_error)
        return cls(
            name=name,
            speedup=speedup.value,
            divergences=tuple(run["divergence"] if run.ok else math.inf for run in paired),
            excess=tuple(signed_gap(run.curve, run.reference_curve) for run in paired if run.ok),
            gradient_error=gradient_error,
            memory_bytes=0.0 if known is None else known["memory_bytes"],
            low=speedup.low,
            high=speedup.high,
            modelled=speedup.source == MODELLED,
            slowest=min((run["speedup"] for run in paired if run.ok), default=math.inf),
            loss=loss,
        )

    @property
    def timed(self) -> bool:
        """Whether its speed-up was timed in a duel."""
        return self.low is not None and not self.modelled

    def is_surely_above(self, speedup: float) -> bool:
        """Say whether a duel shows that it is faster than ``speedup``, beyond its interval."""
        return self.timed and (self.low or 0.0) > speedup

    @property
    def seeds(self) -> int:
        """Paired seeds under which it was measured."""
        return len(self.divergences)


@dataclass(frozen=True)
class Decision:
    """What a search decided, and why.

    Attributes:
        verdict: ``adopt``, ``stay``, or ``undecided`` where it was cut short, or its reference proves nothing.
        reasons: the first says what was decided.
        ranking: everything that was compared, judged; the script first, where it took part.
        index: position of the answer in the ranking: the adopted policy, or the script with ``stay``; None where the
            script was not compared.
        not_taken: why others that were measured to be faster are not the answer, by name.
        rests_on: indices of those whose speeds decided: the chosen one and what is tied with it, or the fastest one
            that a "stay" refuses.
        run: the adopted policy's first run, or the best one so far; None where nothing is adopted.
        explanation: why each kind of layer got its precision, or keeps its own.
        timing_noise: relative difference of two speed-ups that noise alone stays below; 0 where none were compared.
    """

    verdict: str
    reasons: tuple[Reason, ...]
    ranking: tuple[Standing, ...] = ()
    index: int | None = None
    not_taken: dict[str, Reason] = field(default_factory=dict)
    rests_on: tuple[int, ...] = ()
    run: Run | None = None
    explanation: dict[str, Any] = field(default_factory=dict)
    timing_noise: float = 0.0

    @property
    def rejected(self) -> dict[str, Reason]:
        """Why others are not acceptable, by name."""
        return {one.name: one.rejection for one in self.ranking if one.rejection is not None}

    @property
    def reason(self) -> str:
        """All reasons as one text."""
        return sentence(self.reasons)

    @property
    def chosen(self) -> Standing | None:
        """The policy that is adopted; None where none is, or it was not compared with any."""
        return self.ranking[self.index] if self.verdict == "adopt" and self.index is not None else None

    @property
    def seeds(self) -> int:
        """Paired seeds behind the figures of the answer, or of the best policy so far; 0 where there is none."""
        if self.run is None:
            return 0
        return next((one.seeds for one in self.ranking if one.name == self.run.name), 1)

    @property
    def interval(self) -> float:
        """Half width of the two-sided 90 % interval of the chosen one's divergence; no seed lies beyond it."""
        one = self.chosen
        return max(one.upper, *one.divergences) - one.mean if one is not None and one.upper else 0.0

    def with_reasons(self, *more: Reason) -> Decision:
        """Return a copy with further reasons behind the others."""
        return replace(self, reasons=(*self.reasons, *more))


def gradient_limit(
    noise: float | None, max_gradient_error: float = 0.12, *, uninformative: bool = False
) -> float | None:
    """Return the largest relative gradient error that is allowed: a share of the mini-batch gradient noise.

    An error below 0.1 of the noise is harmless, one from 0.35 on always bad (a character GPT, 30 configurations).
    None (for no limit) when the noise is unknown. Where the loss is ``uninformative`` an absolute limit holds as well.

    Args:
        noise: mini-batch gradient noise, relative to the gradient's norm; None when unknown.
        max_gradient_error: the share of it that is allowed.
        uninformative: whether the loss cannot judge.
    """
    known = noise is not None and math.isfinite(noise) and noise > 0
    limits = [max_gradient_error * noise] if known and noise else []
    return min(limits + [UNINFORMATIVE_GRADIENT_ERROR] * uninformative, default=None)


@dataclass(frozen=True, slots=True)
class Rules:
    """What a policy has to keep to, and what its loss is compared with.

    Attributes:
        max_divergence: budget of the mean divergence, a fraction.
        max_gradient: largest acceptable gradient error, from :func:`gradient_limit`.
        max_memory: bytes.
        gradient_noise: mini-batch gradient noise, in whose units gradient errors are given.
        loss: what its losses have to keep to as well, where they are not what is compared; else None.
    """

    max_divergence: float = 0.0025
    baseline: Baseline = field(default_factory=Baseline)
    max_gradient: float | None = None
    max_memory: float | None = None
    gradient_noise: float | None = None
    loss: Rules | None = None

    @property
    def uninformative(self) -> Reason | None:
        """Why the loss cannot judge, None when it can."""
        return uninformative(self.max_divergence, self.baseline)

    @property
    def rounding_gaps(self) -> tuple[float, ...]:
        """Divergences of the benign perturbations."""
        return self.baseline.rounding_gaps or (self.baseline.floor,)

    @property
    def gradient_limit(self) -> float | None:
        """The largest gradient error, the stricter one where the loss is uninformative."""
        known = [] if self.max_gradient is None else [self.max_gradient]
        return min(known + [UNINFORMATIVE_GRADIENT_ERROR] * (self.uninformative is not None), default=None)

    @property
    def bounds(self) -> dict[str, float]:
        """The limits that are set, by the name of the metric that each one bounds."""
        known = {"gradient_error": self.max_gradient, "memory_bytes": self.max_memory}
        return {"divergence": self.max_divergence} | {
            name: float(limit) for name, limit in known.items() if limit is not None
        }

    def exceeded(self, figures: Mapping[str, float]) -> tuple[str, ...]:
        """Name the metrics of one trial that are beyond their limits; a gap that noise explains does not count."""
        bounds = self.bounds | {"divergence": screening_limit(self.max_divergence, figures["noise_floor"])}
        return tuple(name for name, limit in bounds.items() if figures[name] > limit)

    def judge(self, one: Standing) -> Standing:
        """Return a policy with what rule 1 says of it; the script as written is always acceptable."""
        if one.reference:
            return one
        mean, upper = self._bound(one)
        if one.upper is not None:
            upper = max(mean, one.upper)
        limit, lost = self._beyond_limits(one), self._beyond_budget(one, mean, upper)
        loss = None if self.loss is None or one.loss is None else self.loss.judge(one.loss)
        if loss is not None:
            limit = limit or (loss.rejection if loss.final and not loss.by_loss else None)
            lost = lost or (loss.rejection if loss.by_loss else None)
        caveat = None if lost or limit else self._caveat(one, upper) or (loss.caveat if loss else None)
        judged = replace(one, mean=mean, upper=upper, rejection=lost or limit, caveat=caveat, loss=loss)
        return replace(judged, final=limit is not None, by_loss=lost is not None)

    def breaks(self, one: Standing) -> bool:
        """Say whether a policy breaks a limit by what was measured of it, however many seeds that are."""
        mean, _ = self._bound(one)
        loss = self.loss is not None and one.loss is not None and self.loss.breaks(one.loss)
        return bool(loss or self._beyond_limits(one) or self._beyond_budget(one, mean, mean))

    def _bound(self, one: Standing) -> tuple[float, float]:
        chaotic = self.rounding_gaps if self.baseline.noise_floor_upper > self.max_divergence else ()
        return confidence_bound(one.divergences, _NEGLIGIBLE * max(self.max_divergence, self.baseline.floor), chaotic)

    def _beyond_budget(self, one: Standing, mean: float, upper: float) -> Reason | None:
        """Return what the loss says against a policy; None for nothing."""
        named = self.baseline.named
        if not math.isfinite(mean):
            return Reason("incomplete")
        # a loss that is flat speaks against a policy only by what was measured: it need not show that one is harmless
        flat = not self.baseline.learnt and self.baseline.noise_floor_upper <= self.max_divergence
        if (mean if flat else upper) <= self.max_divergence:
            return None
        if self.baseline.noise_floor_upper <= self.max_divergence:
            gaps = {"least": min(one.divergences), "most": max(one.divergences), "seeds": one.seeds} | named
            return Reason("divergence", {"mean": mean, "upper": upper, "limit": self.max_divergence} | gaps)
        # gaps of benign changes are beyond the budget as well
        if is_worse_than_rounding(one.divergences, self.rounding_gaps):
            ratio = compare_gaps(one.divergences, self.rounding_gaps)[0]
            return Reason("beyond_rounding", {"mean": mean, "ratio": ratio} | named)
        excess, least = compare_excess(one.excess, self.baseline.rounding_excess) if one.excess else (0.0, -math.inf)
        return (
            Reason("worse_loss", {"excess": excess, "limit": self.max_divergence} | named)
            if (least > self.max_divergence)
            else None
        )

    def _beyond_limits(self, one: Standing) -> Reason | None:
        """Return which limit of gradient error or memory a policy breaks, whatever its loss; None for none."""
        error, limit, most = one.gradient_error, self.gradient_limit, self.max_memory
        if self.uninformative is not None and error is None:
            return Reason("gradient_unknown", {"loss": self.uninformative})
        if limit is not None and error is not None and error > limit:
            return Reason("gradient_error", {"error": error, "limit": limit, "noise": self.gradient_noise})
        if most is not None and one.memory_bytes > most:
            return Reason("memory_bytes", {"memory": one.memory_bytes, "limit": most})
        return None

    def _caveat(self, one: Standing, upper: float) -> Reason | None:
        """Return how an acceptable policy was judged where the loss could not; None where it could."""
        loss = self.uninformative
        if loss is None or (upper <= self.max_divergence and self.baseline.learnt):
            return None
        chaotic = self.baseline.noise_floor_upper > self.max_divergence
        ratio = compare_gaps(one.divergences, self.rounding_gaps)[0] if chaotic else None
        error, limit = one.gradient_error or 0.0, self.gradient_limit or 0.0
        return Reason("judged_by_gradient", {"loss": loss, "error": error, "limit": limit, "ratio": ratio})


def choose(
    candidates: Sequence[Standing],
    rules: Rules,
    *,
    objective: str = "throughput",
    timing_noise: float = 0.01,
    reference_memory: float = 0.0,
    sixteen_bit: float | None = None,
) -> Decision:
    """Decide; see the module's docstring for the rules.

    Args:
        candidates: the policies, presets among them; the script as written may be one.
        objective: ``throughput``, ``memory`` or ``balanced``.
        timing_noise: relative noise of a speed-up (0 for modelled times).
        reference_memory: bytes of the reference, for the memory objectives; 0 where unknown.
        sixteen_bit: speed-up of the best 16-bit run, which a gain is given over; None on a CPU.
    """
    ranking = tuple(rules.judge(c) for c in candidates)
    script = next((i for i, one in enumerate(ranking) if one.reference), None)
    accepted = [i for i, one in enumerate(ranking) if not one.reference and one.rejection is None]

    def stay(reason: Reason, *rests_on: int) -> Decision:
        return Decision("stay", (reason,), ranking, script, rests_on=rests_on)

    if not accepted:
        no = [{"first": one.name, "why": one.rejection} for one in ranking if one.rejection is not None]
        return stay(Reason("none_acceptable", {**(no[0] if no else {}), "more": max(0, len(no) - 1)}))
    merit = {i: merit_of(ranking[i], objective, reference_memory) for i in accepted}
    leader, timed = max(accepted, key=lambda i: merit[i]), objective == "throughput"
    spans = {i: _span(ranking[i], merit[i], timing_noise, timed=timed) for i in accepted}
    least = 1.0 + (_LEAST_GAIN if timed else 0.0)
    # what is surely slower than another acceptable one is never taken
    gaining = [i for i in accepted if spans[i][0] > 1.0 and merit[i] > least]
    tied = [i for i in gaining if not any(spans[i][1] < spans[j][0] for j in accepted)]
    apart = rules.baseline.metric in MISMATCH
    if not tied and apart:  # nothing gains time: what brings both sides closer at the script's speed does
        closer = [i for i in accepted if ranking[i].excess and max(ranking[i].excess) < -_CLOSER]
        tied = [i for i in closer if spans[i][1] * (1.0 + timing_noise) >= 1.0]
    if not tied:
        return stay(_no_gain(ranking[leader], merit[leader], timing_noise), leader)
    # where few rounds leave intervals wide, what is slower by more than duels are off by is not taken for its safety
    near = (1.0 - _TIED) * max((merit[i] for i in tied if timed and ranking[i].timed), default=0.0)
    tied = [i for i in tied if merit[i] >= near or not ranking[i].timed]
    chosen = min(tied, key=lambda i: _safety(ranking[i], merit[i], apart=apart))
    best = ranking[chosen]
    reason = Reason(
        "adopted",
        {
            "name": best.name,
            "objective": objective,
            "speedup": best.speedup,
            "divergence": best.mean,
            "budget": rules.max_divergence,
            "sixteen_bit": sixteen_bit,
            "caveat": best.caveat,
            "merit": merit[chosen],
            "tied": len(tied),
            "low": best.low,
            "high": best.high,
            "over_16bit": _bounds_over_16bit(best),
            "untimed": best.low is None and not best.modelled,
        }
        | rules.baseline.named
        | ({"excess": float(np.mean(best.excess))} if apart and best.excess else {}),
    )
    return Decision("adopt", (reason,), ranking, chosen, rests_on=(chosen, *tied), run=best.run)


def _bounds_over_16bit(one: Standing) -> list[float | None] | None:
    """Return the model's bounds of a gain over 16 bit; None where it is measured, or not known."""
    found = one.run.metrics.get("speedup_over_16bit") if one.run is not None and not one.timed else None
    return [found.low, found.high] if found is not None and found.low is not None else None


def _span(one: Standing, merit: float, noise: float, *, timed: bool) -> tuple[float, float]:
    """Return bounds of a policy's merit: the interval of a duel, or what timing noise and the slowest trial leave."""
    if timed and one.timed and one.low is not None and one.high is not None:
        return one.low, one.high
    return min(merit / (1.0 + noise), one.slowest if timed else math.inf), merit


def merit_of(one: Standing, objective: str, reference_memory: float) -> float:
    """Return what an objective maximises, over the script as written: speed, memory, or the root of their product.

    Args:
        one: a policy.
        objective: ``throughput``, ``memory`` or ``balanced``.
        reference_memory: bytes of a step of the reference; 0 where unknown.
    """
    saved = reference_memory / one.memory_bytes if one.memory_bytes > 0 and reference_memory > 0 else 1.0
    if objective == "memory":
        return saved
    return math.sqrt(one.speedup * saved) if objective == "balanced" else one.speedup


def _no_gain(one: Standing, merit: float, timing_noise: float) -> Reason:
    """Say why the best acceptable policy is not adopted: it is slower, or its gain cannot be told from noise."""
    data: dict[str, Any] = {"name": one.name, "merit": merit, "noise": timing_noise}
    if not one.timed and one.slowest <= 1.0 < merit:
        data["slowest"] = one.slowest
    return Reason("no_gain", data | ({"low": one.low, "high": one.high} if one.timed else {}))


def _safety(one: Standing, merit: float, *, apart: bool) -> tuple[float, float, float, bool, float]:
    """Order tied policies: how far the sides are ``apart``, where runs are compared by that; gradient error (or
    divergence where it is unknown), memory, presets first, then merit.
    """
    error = one.gradient_error if one.gradient_error is not None else float(np.mean(one.divergences))
    mismatch = float(np.mean(one.excess)) if apart and one.excess else 0.0
    return (mismatch, error, one.memory_bytes, not one.preset, -merit)


def faster_ones(
    chosen: Standing,
    tried: Sequence[Standing],
    rules: Rules,
    rejected: Mapping[str, Reason],
    *,
    fewest: int,
    timing_noise: float,
) -> dict[str, Reason]:
    """Return why each policy that was measured to be faster than the chosen one was not taken, the fastest first.

    Args:
        tried: everything that was, judged.
        rejected: why policies are not acceptable, by name.
        fewest: paired seeds that it takes to be accepted.
        timing_noise: relative difference that two measured speed-ups have by chance; 0 where they are modelled.
    """
    found = [one for one in tried if one.name != chosen.name and round(one.speedup, 2) > round(chosen.speedup, 2)]
    out = {}
    for one in sorted(found, key=lambda one: -one.speedup):
        why = rejected.get(one.name) or _why_not(one, rules, fewest)
        surely = chosen.timed and one.is_surely_above(chosen.high or math.inf)
        if one.speedup <= chosen.speedup * (1.0 + timing_noise) and not surely:
            both = {"timed": True} if chosen.timed and one.timed else {}
            why = Reason("tied", {"noise": timing_noise, "also": why} | both)
        if why is not None:
            out[one.name] = why
    return out


def _why_not(one: Standing, rules: Rules, fewest: int) -> Reason | None:
    """Return why a policy is not acceptable so far; None where it is."""
    if one.rejection and (one.seeds >= fewest or not rules.uninformative or rules.breaks(one)):
        return one.rejection
    return Reason("few_seeds", {"seeds": one.seeds, "needed": fewest}) if one.seeds < fewest else None
