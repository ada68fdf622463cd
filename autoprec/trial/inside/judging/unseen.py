"""Steps whose forward no module shows: between two backward passes, where does an update end and a forward begin?"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from autoprec.graph.recorder import StepRecorder
from autoprec.graph.saved import address_of
from autoprec.trial.inside.judging.shadow import ShadowRecorder


def update_ends(recorder: StepRecorder, before: Iterable[Tensor], after: Iterable[Tensor]) -> int:
    """Return the call that follows the last one that wrote into a weight, or made what a weight is now.

    Args:
        recorder: of what ran since a backward pass.
        before, after: the weights then, and those that the next loss reaches, of any shapes.
    """
    trace, now = recorder.trace, list(after)
    storages = {address_of(one) for one in (*before, *now)}
    made = (trace.created(address_of(one)) for one in now)
    last = [call.index for call in (*made, *trace.writes(storages)) if call is not None]
    return max(last, default=-1) + 1


def forward_begins(recorder: StepRecorder, first: int) -> int:
    """Return the first call from one on that leaves a node for a backward: what precedes it is not the next forward."""
    calls = recorder.trace.calls
    before = recorder.began_at - 1
    for call in calls:
        if call.index >= first and call.seq > before:
            return call.index
        before = call.seq
    return len(calls)


def forget_update(
    recorder: ShadowRecorder, before: Iterable[Tensor], after: Iterable[Tensor], losses: set[int]
) -> None:
    """Leave of a record the forward before a backward: neither the update nor what else has no part in the loss.

    Args:
        recorder: of what ran since the last backward pass.
        before, after: the weights then, and those that the loss reaches, of any shapes.
        losses: their values.
    """
    first = update_ends(recorder, before, after)
    begins = forward_begins(recorder, first) - first
    recorder.drop_before(first)
    made = recorder.trace.made_of(losses)
    recorder.measures = {at: one for at, one in recorder.measures.items() if at >= begins or at in made}
