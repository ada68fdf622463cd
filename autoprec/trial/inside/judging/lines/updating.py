"""What an update by hand loses before it reaches the weights: norms that overflow, sums, an epsilon that is zero.

In a loop with an optimizer this lies between backward and its step, and is part of the recorded step. Without one it is
part of the update, of which :mod:`autoprec.trial.inside.judging.by_hand` has the record.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from autoprec.graph.census import Observation
from autoprec.graph.trace import Call
from autoprec.trial.inside.judging.by_hand import UpdateRecorder
from autoprec.trial.inside.judging.forward import LOST, LOW, REDUCES

#: Operators that give one number of many, or of a few such numbers.
_SUMS = (*REDUCES, "norm", "linalg_vector_norm", "_foreach_norm", "dot", "add", "cumsum")


def updating(recorder: UpdateRecorder, written: Collection[int]) -> Iterator[Observation]:
    """Yield the lines of an update by hand that are not finite in fp16, lose a sum, or add an epsilon that is zero.

    Args:
        recorder: of the update.
        written: calls that what the weights become is made of, by index; others only make what is logged.
    """
    rows = [(recorder.trace.calls[at], measure) for at, measure in recorder.measures.items()]
    told: set[tuple[str, str]] = set()

    def observed(code: str, call: Call, **figures: object) -> Iterator[Observation]:
        values = (*recorder.trace.inputs(call), *recorder.trace.outputs(call))
        dtype = next((value.dtype for value in values if value.dtype in LOW), "rounded fp32")
        if call.where and (code, call.where) not in told:
            told.add((code, call.where))
            figures |= {"to": dtype, "logged": not _reaches(recorder, call, written)}
            yield Observation(code, call.where, call.op, "", (dtype,), figures)

    yield from lost_epsilons(recorder)
    over = next((call for call, measure in rows if measure.overflowed), None)
    if over is not None:
        yield from observed("overflow-16bit", over, overflowed=recorder.measures[over.index].overflowed)
    for call, error in _sums(recorder) if over is None else ():
        yield from observed("reduction-16bit", call, error=error, gradient=0.0, adds=0, trained=False)


def lost_epsilons(recorder: UpdateRecorder) -> Iterator[Observation]:
    """Yield the lines of an update, by hand or by an optimizer of the script's own, whose epsilon is zero."""
    told = set[str]()
    for at, measure in recorder.measures.items():
        call = recorder.trace.calls[at]
        if "eps" in measure.figures and call.where and call.where not in told:
            told.add(call.where)
            dtype = next((v.dtype for v in recorder.trace.inputs(call) if v.dtype in LOW), "")
            figures = {"eps": measure.figures["eps"], "what": call.name, "to": dtype}
            yield Observation("eps-zero", call.where, call.op, "", (dtype,), figures)


def _sums(recorder: UpdateRecorder) -> Iterator[tuple[Call, float]]:
    """Yield each line that makes one number whose error those that it was given had not, and that error."""
    trace, lines = recorder.trace, dict[str, list[Call]]()
    for at in recorder.measures:
        call = trace.calls[at]
        if call.name in _SUMS and call.outs and not any(value.shape for value in trace.outputs(call)):
            lines.setdefault(call.where, []).append(call)
    for where, calls in lines.items():
        worst = max(calls, key=lambda call: recorder.measures[call.index].error)
        error = recorder.measures[worst.index].error
        makers = (trace.producer(value) for call in calls for value in call.ins)
        others = (one for one in makers if one is not None and one.where != where and one.index in recorder.measures)
        if error >= LOST and error > 3 * max((recorder.measures[one.index].error for one in others), default=0.0):
            yield worst, error


def _reaches(recorder: UpdateRecorder, call: Call, written: Collection[int]) -> bool:
    """Say whether what a call gives may become a part of the weights: also as a number that Python computes with."""
    below = (one for out in call.outs for one, _ in recorder.trace.below(out, lambda _: True, depth=12))
    return call.index in written or any(one.name == "_local_scalar_dense" for one in below)
