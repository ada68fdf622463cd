"""What lifting lines of a script to more bits shows of its precision, one line at a time and all at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from autoprec.support.plain import Document


def least_change(noise: float | None) -> float:
    """Return the relative change of a gradient below which lifting lines says nothing: twice what a few bits change."""
    return max(1e-5, 2.0 * (noise or 0.0))


@dataclass(frozen=True, slots=True)
class LiftedLines:
    """The answer to a :class:`autoprec.trial.protocol.LiftSpec`.

    Attributes:
        rows: ``where``, ``operator``, ``module``, ``dtypes`` of each line; ``error``: the largest relative error of
            what it computes from what it is given; ``gradient``: the relative change of the whole gradient when it
            alone is lifted; ``update``: that of what the optimizer's step then changes of the weights, None where that
            is not known. An optimizer whose weights or state are in 16 bits has a row of its own, whose step is lifted.
            Largest first.
        every: the change of the gradient when all lines are lifted; None where a gradient is not finite.
        every_update: that of the update.
        noise: the change of the gradient when a few elements of the step's first result have another last bit.
        wide: the dtype that lines were lifted to.
        left: lines that were not lifted one at a time: there were too many, or all together change no more than noise.
        alike: lines that give the same when they are lifted, and were not.
    """

    kind: ClassVar[str] = "lifted"
    rows: tuple[Document, ...] = ()
    every: float | None = None
    every_update: float | None = None
    noise: float | None = None
    wide: str = "fp32"
    left: int = 0
    alike: int = 0
