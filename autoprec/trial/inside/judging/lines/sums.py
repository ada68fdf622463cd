"""Sums that backward forms in 16 bits: the gradient of what was indexed, of an embedding, of what was gathered.

One row that is read a thousand times gets a thousand gradients, which some kernels add up one by one in the dtype of
the gradient. The twin of such an operator adds them up in FP32.
"""

from __future__ import annotations

from collections.abc import Iterator

from autoprec.graph.census import Observation
from autoprec.trial.inside.judging.forward import LOW, Step, observed

#: Operators of backward that add several gradients to one place.
_GATHERS = frozenset(
    ("index_put", "_index_put_impl", "index_add", "scatter_add", "embedding_dense_backward", "_embedding_bag_backward")
)
#: Relative error from which on such a sum has lost digits: a tenth of it is one rounding.
_LOST = 0.03


def gathered(step: Step) -> Iterator[Observation]:
    """Yield the lines whose backward loses digits as it adds up gradients in 16 bits, the worst of each line."""
    worst = dict[str, tuple[float, Observation]]()
    for call, operator, measure in step.rows:
        if call.phase != "backward" or call.name not in _GATHERS or not operator.where or measure.error < _LOST:
            continue
        low = next((dtype for dtype in operator.dtypes if dtype in LOW), "")
        if not low or measure.error < 3 * measure.before or measure.error <= worst.get(operator.where, (0.0,))[0]:
            continue
        # other devices' kernels add up in FP32: no error of the script's, however much of it is lost here
        seen = observed("reduction-16bit", operator, error=measure.error, to=low, trained=False, backward=True)
        worst[operator.where] = measure.error, seen
    yield from (seen for _, seen in worst.values())
