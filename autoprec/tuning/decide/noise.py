"""What a short loss curve can tell about a policy, and what is asked instead where it can tell nothing.

Rounding every weight once to bfloat16 is the smallest change of precision there is, and harmless. In a calm script it
moves the loss by some thousandths of a percent: a gap of the size of the budget is then the policy's doing. Where
training is chaotic the same rounding grows within some steps into a gap of percents, and so does any other change: a
gap of 2 % says nothing against a policy there, and one of 0.5 % nothing for it. A loss that does not move at all (the
first steps of a warm-up) proves nothing either. The loss is *uninformative* in both cases, and instead is asked:

1. How wrong is the gradient? It is compared on the same weights and the same batch, so chaos does not enter.
2. Are the gaps larger than those of benign changes, beyond what 16-bit arithmetic in every step explains?
3. Is the loss worse? Chaotic gaps have either sign; a policy that hurts has them on one side.

Only the first can speak for a policy, and its limit is stricter than elsewhere; the others can only speak against it.

How far up may the mean of a few seeds be? The divergence of one policy varies from seed to seed like a lognormal
variable, and four seeds that lie close together by chance promise far too much. So what is known of the spread
beforehand is pooled with them, and the spread of benign gaps where training is chaotic; the bound is Cox's for the mean
of a lognormal variable (Zhou and Gao, Statistics in Medicine 16, 1997), with Student's t for the pooled degrees of
freedom.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from autoprec.support.arrays import np, npt
from autoprec.tuning.decide.sentences import Reason

Vector = npt.NDArray[np.float64]

#: One-sided 95 % quantiles of Student's t by degrees of freedom.
_T95 = (
    6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833, 1.812, 1.796, 1.782, 1.771, 1.761, 1.753,
    1.746, 1.740, 1.734, 1.729, 1.725, 1.721, 1.717, 1.714, 1.711, 1.708, 1.706, 1.703, 1.701, 1.699, 1.697,
)  # fmt: skip
#: What is known beforehand of the standard deviation of ln(divergence) over seeds, and how many degrees of freedom that
#: counts for: of a policy's own gaps, and where training is chaotic.
_SEED_SD, _CHAOTIC_SD, _KNOWN_DF = 0.4, 0.5, 4
#: Benign perturbations of the reference that are run where one of them may lie above the budget.
BENIGN_RUNS = 4
#: Share of the budget from which on one benign gap may be below the budget by chance only: their logarithms spread by
#: about 0.5, and the mean of a few lies within a factor of four of each of them.
_NEARLY = 0.25
#: Largest relative gradient error where the loss is uninformative. An error of 0.1, orthogonal to the gradient, turns
#: the step by 6 degrees and costs half a percent of its progress; bf16 is near 0.005, FP8 near 0.05, FP4 above 0.2.
UNINFORMATIVE_GRADIENT_ERROR = 0.1
#: A policy in 16 bits rounds in every step, the benign perturbation once; over short windows its gaps are up to this
#: many times as large where the gaps have not yet grown to their full size.
_EVERY_STEP = 4.0
#: What the gap of one trial may be above the mean of several: two standard deviations of a lognormal spread of 0.4.
_ONE_TRIAL = 2.0
#: The loss of the reference has learnt when its smoothed curve moves by this share of it, and when fewer than the
#: second share of random orders of its losses look as much like a curve by one of three statistics (so the noise of
#: batches alone passes in at most 1 of 200 scripts that learn nothing); fewer steps than the last say nothing about it.
_LEAST_MOVE, _BY_CHANCE, _FEWEST_STEPS = 0.01, 0.0015, 7
#: Where order alone cannot tell, a run is asked whose optimizers do nothing. Its losses tell training from none where
#: they lie this many budgets off: then the budget tells a policy that trains from one that does not.
_BUDGETS = 4.0
#: Random orders that are tried, and the points a curve is averaged to at most before.
_ORDERS, _MOST_POINTS = 4000, 256
#: Standard deviation of ln(gradient error / gradient noise) over the seeds of one policy known beforehand, which counts
#: for as many degrees of freedom.
_ERROR_SD = 0.2
#: Gaps below this are float32 rounding of the loss.
_TINY = 1e-7


@dataclass(frozen=True, slots=True)
class Baseline:
    """What is known of the script itself, beside which candidates are judged.

    Attributes:
        floor: mean divergence of the benign perturbations, a fraction.
        rounding_gaps: their divergences; the floor alone when empty.
        rounding_excess: their signed relative loss gaps.
        learnt: whether the script's own loss moved over the steps that are compared.
        flat_because: what is known of why it did not; empty for nothing.
        floor_runs: runs that the floor is the mean of; 0 for those of ``rounding_gaps``.
        metric: what runs are compared by in place of their losses; empty for those.
        loss: the same of the losses, where that metric does not show whether the script trains; else None.
    """

    floor: float = 0.0
    rounding_gaps: tuple[float, ...] = ()
    rounding_excess: tuple[float, ...] = ()
    learnt: bool = True
    flat_because: str = ""
    floor_runs: int = 0
    metric: str = ""
    loss: Baseline | None = None

    @property
    def named(self) -> dict[str, str]:
        """What sentences need to name the metric."""
        return {"metric": self.metric} if self.metric else {}

    @property
    def noise_floor_upper(self) -> float:
        """How far the benign perturbation itself may be from the reference: upper 95 % bound of the floor."""
        return max(self.floor, confidence_bound(self.rounding_gaps)[1] if self.rounding_gaps else 0.0)

    def over_seeds(self, further: Sequence[tuple[float, float]]) -> Baseline:
        """Return the baseline with the (divergence, signed gap) of the benign perturbation under further seeds.

        One perturbation of each seed counts, but the floor stays where that of the first seed's is higher. Without
        further seeds the baseline is returned as it is.
        """
        if not further:
            return self
        gaps, excess = zip(*further, strict=True)
        rounding_gaps = (*self.rounding_gaps[:1], *gaps)
        mean, runs = float(np.mean(rounding_gaps)), self.floor_runs or len(self.rounding_gaps)
        floor, runs = (mean, len(rounding_gaps)) if mean > self.floor else (self.floor, runs)
        return replace(
            self,
            floor=floor,
            floor_runs=runs,
            rounding_gaps=rounding_gaps,
            rounding_excess=(*self.rounding_excess[:1], *excess),
        )


def student95(freedom: int) -> float:
    """Return the one-sided 95 % quantile of Student's t (that of 30 degrees of freedom beyond 30)."""
    return _T95[min(max(freedom, 1), len(_T95)) - 1]


def confidence_bound(
    gaps: Sequence[float], negligible: float = _TINY, chaotic: Sequence[float] = ()
) -> tuple[float, float]:
    """Return (mean, upper 95 % bound of the mean) of a policy's divergences, one per paired seed.

    Args:
        gaps: fractions; where there is none, or one that is not finite, there is no bound (infinity).
        negligible: divergences below this count as this much: their logarithms say nothing.
        chaotic: those of benign perturbations where training is chaotic: seeds make both vary alike.
    """
    if not len(gaps) or not np.isfinite(gaps).all():
        return math.inf, math.inf
    mean, logs, count = float(np.mean(gaps)), _logs(gaps, negligible), len(gaps)
    known = _KNOWN_DF * (_CHAOTIC_SD if len(chaotic) else _SEED_SD) ** 2
    freedom = _KNOWN_DF + count - 1 + max(len(chaotic) - 1, 0)
    squares = known + _squares(logs) + (_squares(_logs(chaotic)) if len(chaotic) else 0.0)
    # a spread far above the usual is not chance: FP8 may be harmless under most seeds and ten times as bad under one
    own = _squares(logs) / max(count - 1, 1)
    variance = max(squares / freedom, own)
    error = math.sqrt(variance / count + variance**2 / (2 * (freedom + 2)))
    return mean, max(mean, math.exp(float(logs.mean()) + variance / 2 + student95(freedom) * error))


def needs_more_benign_runs(gaps: Sequence[float], budget: float) -> bool:
    """Say whether another benign perturbation should be run: one gap near the budget does not tell the floor."""
    return len(gaps) < BENIGN_RUNS and max(gaps, default=0.0) > _NEARLY * budget


def has_learnt(losses: Sequence[float], *, few: bool = True) -> bool:
    """Say whether a reference's loss moved over its steps, beyond the noise between batches.

    The noise is judged without its trend: losses that only scatter are as likely in any other order (a permutation
    test), whatever their distribution. Three statistics together see a steady slope, a steep start before a plateau,
    and losses that fall again after each jump.

    Args:
        losses: one per step, from the first step on.
        few: what is returned where there are too few of them to tell.
    """
    values = np.asarray(losses, dtype=np.float64)
    values = values[np.isfinite(values)]
    if len(values) < _FEWEST_STEPS:
        return few
    block = -(-len(values) // _MOST_POINTS)
    values = values[: len(values) // block * block].reshape(-1, block).mean(axis=1)
    smooth = np.convolve(values, np.full(width := max(2, len(values) // 6), 1 / width), "valid")
    if float(np.ptp(smooth)) <= _LEAST_MOVE * float(np.abs(values).mean()):
        return False
    values = values / np.ptp(values)
    ranks = values.argsort().argsort().astype(np.float64)
    orders = _orders(len(values))
    observed, chance = _curvelike(values[None], ranks[None]), _curvelike(values[orders], ranks[orders])
    return bool(((chance >= observed - 1e-9).mean(axis=1) < _BY_CHANCE).any())


def tells_training(gap: float, budget: float) -> bool:
    """Say whether a loss tells training from none, by how far a run lies off that does not train.

    The two see the same batches, so that a loss shows it which scatters more than it falls. A gap of some budgets it
    takes, as a policy under which nothing is learnt would else be within the budget, too.

    Args:
        gap: divergence of a run whose optimizers do nothing from the reference, a fraction.
        budget: largest acceptable divergence, a fraction.
    """
    return _BUDGETS * budget < gap < math.inf


@lru_cache(maxsize=8)
def _orders(count: int) -> npt.NDArray[np.int64]:
    return np.argsort(np.random.default_rng(0).random((_ORDERS, count)), axis=1)


def _curvelike(rows: Vector, ranks: Vector) -> Vector:
    """Return how much each row of losses, given with its ranks, looks like a curve: three statistics, ``[3, rows]``."""
    steps = np.arange(rows.shape[1]) - (rows.shape[1] - 1) / 2
    return np.stack(
        [
            np.abs(ranks @ steps),  # Spearman: it rises or falls
            -(np.diff(ranks, axis=1) ** 2).sum(axis=1),  # Bartels: neighbours are alike in rank
            -(np.diff(rows, axis=1) ** 2).sum(axis=1),  # von Neumann: and in size
        ]
    )


def uninformative(budget: float, baseline: Baseline) -> Reason | None:
    """Return why the loss cannot judge a policy; None when it can.

    It cannot where the rule for policies would reject the benign perturbation itself.

    Args:
        budget: largest acceptable divergence, a fraction.
    """
    if baseline.noise_floor_upper > budget:
        found = {"floor": baseline.floor, "noise_floor_upper": baseline.noise_floor_upper, "budget": budget}
        runs = {"runs": max(1, baseline.floor_runs or len(baseline.rounding_gaps))}
        return Reason("noise_beyond_budget", found | runs | baseline.named)
    cause = ({"cause": baseline.flat_because} if baseline.flat_because else {}) | baseline.named
    return None if baseline.learnt else Reason("loss_flat", cause)


def screening_limit(budget: float, floor: float) -> float:
    """Return the divergence up to which one short trial stays a candidate: the budget, or what noise explains.

    Where the floor is far below the budget, a gap beyond the budget counts against a policy. Where it is near or above
    it, only a gap counts that neither rounding in every step nor the spread of single trials explains.
    """
    return budget if floor <= _NEARLY * budget else max(budget, _EVERY_STEP * _ONE_TRIAL * floor)


def compare_gaps(gaps: Sequence[float], rounding_gaps: Sequence[float]) -> tuple[float, float]:
    """Return (ratio, lower 95 % bound of the ratio) of a policy's gaps to those of benign perturbations.

    Both are lognormal with one spread, known beforehand to about 0.5 and pooled from both.

    Args:
        gaps: divergences of the policy, one per paired seed, finite; at least one.
        rounding_gaps: divergences of the perturbed reference; at least one.
    """
    ours, theirs = _logs(gaps), _logs(rounding_gaps)
    freedom = _KNOWN_DF + len(ours) + len(theirs) - 2
    squares = _KNOWN_DF * _CHAOTIC_SD**2 + _squares(ours) + _squares(theirs)
    error = math.sqrt(squares / freedom * (1 / len(ours) + 1 / len(theirs)))
    ratio = float(ours.mean() - theirs.mean())
    return math.exp(ratio), math.exp(ratio - student95(freedom) * error)


def is_worse_than_rounding(gaps: Sequence[float], rounding_gaps: Sequence[float]) -> bool:
    """Say whether a policy's gaps are surely larger than rounding in every step explains."""
    return compare_gaps(gaps, rounding_gaps)[1] > _EVERY_STEP


def error_over_limit(shares: Sequence[float]) -> tuple[float, float]:
    """Return (mean, lower 95 % bound of the mean) of gradient errors, each as a share of the limit of its seed.

    Args:
        shares: above 0, one per paired seed; at least one.
    """
    logs = np.log(np.asarray(shares, dtype=np.float64))
    freedom = _KNOWN_DF + len(logs) - 1
    error = math.sqrt((_KNOWN_DF * _ERROR_SD**2 + _squares(logs)) / freedom / len(logs))
    return math.exp(float(logs.mean())), math.exp(float(logs.mean()) - student95(freedom) * error)


def compare_excess(excess: Sequence[float], rounding_excess: Sequence[float]) -> tuple[float, float]:
    """Return (mean, lower 95 % bound of the mean) of a policy's excess loss over that of benign perturbations.

    A benign change helps no loss: its gaps scatter around zero, and where they lie below it by chance, a policy whose
    loss is that of the script is not higher.

    Args:
        excess: signed relative gaps of the policy (positive: its loss is higher), one per paired seed.
        rounding_excess: the same of the perturbed reference; may be empty (then it counts as zero).

    Returns:
        Fractions; the bound is minus infinity where fewer than four values cannot tell the spread.
    """
    ours, theirs = (np.asarray(values, dtype=np.float64) for values in (excess, rounding_excess))
    mean = float(ours.mean()) - (max(0.0, float(theirs.mean())) if len(theirs) else 0.0)
    freedom = len(ours) - 1 + len(theirs)
    if freedom < 3:
        return mean, -math.inf
    variance = (_squares(ours) + float((theirs**2).sum())) / freedom
    shares = 1 / len(ours) + (1 / len(theirs) if len(theirs) else 0.0)
    return mean, mean - student95(freedom) * math.sqrt(variance * shares)


def _logs(gaps: Sequence[float], least: float = _TINY) -> Vector:
    return np.asarray(np.log(np.maximum(np.asarray(gaps, dtype=np.float64), least)))


def _squares(values: Vector) -> float:
    return float(((values - values.mean()) ** 2).sum())
