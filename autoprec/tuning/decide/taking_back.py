"""Which lowerings of a policy are taken back: they save less than can be told, and carry much of its error."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autoprec.policy.solver import FloatTable, IntVector, solve

#: Share of a step that is not told from nothing, timed or modelled.
LEAST_SAVING = 0.005
#: What has to be taken back of a policy's squared error for a run of it, and what each group is part of that for.
_LEAST_ERROR, _LEAST_PART = 0.1, 0.02


def taken_back(index: IntVector, time: FloatTable, errors: Sequence[FloatTable], room: float) -> IntVector | None:
    """Return the assignment of least error that is slower by no more than ``room``; None where it is hardly better.

    No group gets a choice of more error than it has, so nothing is lowered in exchange.

    Args:
        index: ``[G]`` columns of the policy.
        time: ``[G, C]`` of each group under each choice, in the unit of ``room``.
        errors: tables ``[G, C]`` of squared errors that may not grow; the first is what is made small.
        room: time that may be given up, all groups together.
    """
    rows = np.arange(len(index))
    now = [table[rows, index] for table in errors]
    safer = [table <= have[:, None] for table, have in zip(errors, now, strict=True)]
    offered = np.logical_and.reduce(safer) & np.isfinite(time)
    offered[rows, index] = True
    longer = np.where(offered, np.maximum(time - time[rows, index][:, None], 0.0), 0.0)
    found = solve(np.where(offered, errors[0], np.inf), longer, room) if room > 0 else None
    if found is None:
        return None
    less = (now[0] - errors[0][rows, found]) / max(float(now[0].sum()), 1e-300)
    found = np.where(less >= _LEAST_PART, found, index)
    return found if float(less[less >= _LEAST_PART].sum()) >= _LEAST_ERROR else None
