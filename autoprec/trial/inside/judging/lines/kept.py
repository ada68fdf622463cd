"""Running statistics that no buffer holds: a tensor in 16 bits that each forward moves a little, and no loss reads."""

from __future__ import annotations

from collections.abc import Iterator

from autoprec.graph.census import Observation
from autoprec.graph.trace import Call
from autoprec.trial.inside.judging.forward import LOW, Step, observed

#: Operators by which a mean moves, if what is written is made of the mean.
_MOVES = ("add", "sub", "copy")


def statistics(step: Step) -> Iterator[Observation]:
    """Yield the lines of forward that move a tensor in 16 bits by a share, which is no buffer and no loss reads."""
    values, told = step.recorder.trace.values, set[str]()
    for call, operator, measure in step.rows:
        to = values[call.ins[0]] if call.ins and call.op.endswith("_") else None
        if to is None or call.phase != "forward" or to.dtype not in LOW or not to.shape or operator.where in told:
            continue
        other = to.origin in ("parameter", "buffer") or to.grad or to.storage not in step.recorder.outside
        unchanged = max(measure.unchanged or 0.0, measure.figures.get("kept", 0.0))
        if other or call.index in step.trained or not _moves_a_mean(step, call):
            continue
        told.add(operator.where)
        if _is_of_weights(step, operator.where):
            yield observed("ema-16bit", operator, unchanged=unchanged, error=measure.error, to=to.dtype)
            continue
        table = f"of {call.module}" if call.module and call.module in step.recorder.names.modules else "of the script"
        yield observed("statistics-16bit", operator, unchanged=unchanged, error=measure.error, table=table, to=to.dtype)


def _is_of_weights(step: Step, where: str) -> bool:
    """Say whether a line reads weights, as they are or cast: what it keeps is an average of them."""
    trace, operators = step.recorder.trace, step.report.operators

    def passes(call: Call) -> bool:
        return operators[call.index].cls in ("view", "cast")

    own = [call for call, operator, _ in step.rows if operator.where == where]
    above = [one for call in own for value in call.ins for one in trace.above(value, passes) if passes(one)]
    return any(trace.values[value].origin == "parameter" for call in (*own, *above) for value in call.ins)


def _moves_a_mean(step: Step, call: Call) -> bool:
    """Say whether a call moves what it writes into towards something else: a mean, and no sum."""
    trace, figures = step.recorder.trace, step.measures[call.index].figures
    if call.name.removeprefix("_foreach_") == "lerp" or "factor" in figures:
        return True
    storage = trace.values[call.ins[0]].storage
    above = (one for value in call.ins[1:] for one in trace.above(value, lambda _: True))
    return call.name.removeprefix("_foreach_") in _MOVES and any(
        trace.values[value].storage == storage for one in above for value in one.ins
    )
