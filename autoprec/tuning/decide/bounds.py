"""How far up the mean divergence of a policy may be, from a few paired seeds.

The divergence of one policy varies from seed to seed like a lognormal variable: its logarithm has a standard deviation
of 0.3 to 0.5, about the same for all policies of one script at one level (benchmarks/search_quality.py). Four seeds say
little about that spread, and four that happen to lie close together promise far too much when the bound is Student's t
on each policy's own four. So the spread is taken from all finalists at the
same level, and from what is known beforehand; the bound is Cox's for the mean of a lognormal variable (Zhou and Gao,
Statistics in Medicine 16, 1997), with Student's t for the degrees of freedom of the pooled spread.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

__all__ = ["confidence_bounds"]

#: One-sided 95 % quantiles of Student's t by degrees of freedom.
_T95 = (
    6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833, 1.812, 1.796, 1.782, 1.771, 1.761, 1.753,
    1.746, 1.740, 1.734, 1.729, 1.725, 1.721, 1.717, 1.714, 1.711, 1.708, 1.706, 1.703, 1.701, 1.699, 1.697,
)  # fmt: skip
#: Standard deviation of ln(divergence) known beforehand, and how many degrees of freedom that counts for.
_PRIOR_SD, _PRIOR_DF = 0.4, 4
#: Degrees of freedom that others lend at most, the factor of level within which they are like this one, and the
#: standard deviation from which on one of them is thought to have heavy tails of its own (it lends no more than this).
_MOST_LENT, _LIKE, _WIDEST_LENT = 12, 3.0, 0.6

Vector = npt.NDArray[np.float64]


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
    # a spread far above everybody's is no chance: FP8 may be harmless under most seeds and ten times as bad under one
    variance = max((freedom * lent + squares) / total, squares / max(count - 1, 1))
    error = math.sqrt(variance / count + variance**2 / (2 * (total + 2)))
    return math.exp(float(logs.mean()) + variance / 2 + _T95[min(total, len(_T95)) - 1] * error)
