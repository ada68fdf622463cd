"""What forward and backward of a recorded step were seen to lose, line by line."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from autoprec.graph.census import Observation
from autoprec.graph.report import GraphReport, Operator
from autoprec.graph.trace import SCRIPT, Call, Value
from autoprec.trial.inside.judging.shadow import Measure, ShadowRecorder

LOW = ("bf16", "fp16")
#: Half a unit in the last place of 1, by dtype: the largest relative error of one rounding.
HALF_ULP = {"bf16": 2.0**-9, "fp16": 2.0**-12}
#: A relative error that a chain of single roundings does not come to.
LOST = 0.02
_LOSSES = ("_log_softmax", "log_softmax", "logsumexp")
#: Losses of which the last side of what they are given counts classes.
_OF_CLASSES = (*_LOSSES, "nll_loss_forward", "nll_loss2d_forward", "nll_loss", "cross_entropy_loss")
_PATTERNS = {
    "rms_norm": "norm-16bit",
    "layer_norm": "norm-16bit",
    "l2_norm": "norm-16bit",
    "softmax": "softmax-16bit",
    "logsumexp": "softmax-16bit",
}
REDUCES = ("mean", "sum", "var", "var_mean", "std", "std_mean")
_ADDS = ("add", "_foreach_add", "addcmul", "_foreach_addcmul", "lerp", "_foreach_lerp", "add_n")
#: Operators at whose jumps a small difference of the input is a large one of the output: no digits are lost there.
JUMPS = frozenset(("round", "floor", "ceil", "sign", "trunc", "fmod", "remainder", "where", "masked_fill"))
_QUIET = (*JUMPS, "sin", "cos")
#: Classes of operators that bring numbers somewhere, and compute nothing.
_CARRIES = frozenset(("view", "cast", "allocation"))
#: Those through which positions go, and angles.
_POSITIONAL = frozenset(("view", "cast", "pointwise", "gemm", "attention", "allocation", "transcendental"))
#: Error of a loss that is said of itself: what is made of it is not said once more.
_TOLD = 0.001
#: What a difference has to lose: that of a value and its mean loses some digits where the mean is large.
_DIFFERENCE = 0.1

_Rows = list[tuple[Call, Operator, Measure]]


@dataclass(frozen=True)
class Step:
    """One recorded step: the trace, what was measured, and the report made of it.

    Attributes:
        backward_at: ``file:line`` of each backward pass.
        scaled: the loss was multiplied before backward, by a GradScaler or by hand.
        scale: by what a GradScaler did.
        casts: ``file:line`` and dtype of the casts of modules that the script made before.
        roots: values that backward began with, -1 for one that was not seen.
        kept: storages of the weights and their gradients, as the optimizer will read them.
    """

    recorder: ShadowRecorder
    report: GraphReport
    backward_at: tuple[str, ...] = ()
    scaled: bool = False
    scale: float = 1.0
    casts: tuple[tuple[str, str], ...] = ()
    roots: tuple[int, ...] = ()
    kept: frozenset[int] = frozenset()

    @property
    def calls(self) -> list[Call]:
        """Every operator call of the step, in order."""
        return self.recorder.trace.calls

    @property
    def measures(self) -> dict[int, Measure]:
        """What was measured, by the index of the call."""
        return self.recorder.measures

    @cached_property
    def rows(self) -> _Rows:
        """Calls that were measured, with their operators."""
        operators = self.report.operators
        return [(self.calls[i], operators[i], m) for i, m in self.measures.items() if i < len(operators)]

    @cached_property
    def behind(self) -> dict[int, float]:
        """The largest error of the backward operators of each forward call, by its sequence number.

        An error that was there before is another operator's, or nobody's: of the gradient of a maximum that a softmax
        subtracts the terms cancel, and nothing is left to compare.
        """
        out: dict[int, float] = {}
        for call, _, measure in self.rows:
            own = measure.error < _DIFFERENCE or measure.before < 0.5 * measure.error
            if call.phase == "backward" and call.seq >= 0 and own:
                out[call.seq] = max(out.get(call.seq, 0.0), measure.error)
        return out

    @cached_property
    def trained(self) -> set[int]:
        """The calls that what backward began with is made of, by index: every call where that was not seen."""
        trace = self.recorder.trace
        if not self.roots or min(self.roots) < 0:
            return set(range(len(trace.calls)))
        return trace.made_of(self.roots)

    @cached_property
    def arriving(self) -> set[int]:
        """The calls that the optimizer's gradients are made of, by index."""
        trace = self.recorder.trace
        return trace.made_of(i for i, value in enumerate(trace.values) if value.storage in self.kept)

    def is_logged(self, call: Call) -> bool:
        """Say whether a call after backward makes a number that no gradient is multiplied with."""
        if call.phase != "update" or call.index in self.arriving:
            return False
        trace = self.recorder.trace
        below = [c for out in call.outs if not call.op.endswith("_") for c, _ in trace.below(out, lambda _: True)]
        return any(not value.shape for one in (call, *below) for value in trace.outputs(one))

    @cached_property
    def collapsed(self) -> dict[int, int]:
        """The calls whose positions are not distinct, by index: the first of them that each is made of, or itself."""
        found: dict[int, int] = {}
        for call, operator, measure in self.rows:
            if operator.phase == "forward" and measure.figures.get("positions", 0) > measure.figures.get("distinct", 0):
                found[call.index] = next((found[one] for one in self._carried(call) if one in found), call.index)
        return found

    def is_of_positions(self, call: Call) -> bool:
        """Say whether a call makes, of positions that are not distinct, what has no gradient: a table, a bias."""
        if not self.collapsed or any(value.grad for value in self.recorder.trace.outputs(call)):
            return False
        return any(one in self.collapsed for one in self._carried(call))

    def carries(self, call: Call) -> bool:
        """Say whether positions and angles go through a call."""
        return self.report.operators[call.index].cls in _POSITIONAL

    def _carried(self, call: Call) -> Iterator[int]:
        trace = self.recorder.trace
        return (one.index for value in call.ins for one in trace.above(value, self.carries, depth=14))

    def values(self, call: Call) -> list[Value]:
        """Return the tensors that a call reads."""
        return self.recorder.trace.inputs(call)

    def cast(self, dtype: str) -> str:
        """Return the line that cast a module to a dtype last; empty where none did."""
        return next((where for where, to in reversed(self.casts) if to == dtype), "")


def seen(step: Step) -> list[Observation]:
    """Return everything that forward and backward lose, in the order of the lines that do."""
    found = list[Observation]()
    for look in _LOOKS:
        found += look(step)
    return found


def observed(
    code: str, operator: Operator, *, also: tuple[str, ...] = (), where: str = "", **figures: Any
) -> Observation:
    """Return an observation about an operator.

    Args:
        code: of the rule table.
        operator: what it is about.
        also: further lines that have to do with it.
        where: the line, where that is not the operator's own.
        figures: what was measured.
    """
    dtypes = tuple(dict.fromkeys(operator.dtypes))
    return Observation(
        code, where or operator.where, operator.op, operator.module, dtypes, figures, tuple(a for a in also if a)
    )


def low_of(operator: Operator) -> str:
    """Return the 16-bit dtype that an operator reads or gives; empty for none."""
    return next((one for one in (*operator.dtypes, *operator.out_dtypes) if one in LOW), "")


# --- the loss --------------------------------------------------------------------------------------------------------
def _loss_lines(step: Step) -> dict[str, _Rows]:
    """Return what is computed of losses in 16 bits, by line."""
    lines: dict[str, _Rows] = {}
    for call, operator, measure in step.rows:
        is_loss = operator.cls == "loss" or call.name in _LOSSES or operator.pattern in ("cross_entropy", "logsumexp")
        is_loss = is_loss and operator.cls in ("loss", "softmax")
        lost = measure.before >= LOST and measure.error < 3 * measure.before  # before the loss
        if call.phase == "forward" and is_loss and measure.error > 0 and not lost and not _cancels(step, call):
            lines.setdefault(operator.where, []).append((call, operator, measure))
    return lines


def _logarithms(lines: dict[str, _Rows]) -> dict[str, _Rows]:
    """Return the lines that take a logarithm: where the digits of a likelihood go, whatever is made of it later."""
    return {at: rows for at, rows in lines.items() if any(c.name in (*_LOSSES, "log") for c, _, _ in rows)}


def _told(step: Step) -> set[str]:
    """Return the lines that are named for the logarithm of a loss."""
    lines = _logarithms(_loss_lines(step))
    return {where for where, rows in lines.items() if max(m.error for _, _, m in rows) >= _TOLD}


def _losses(step: Step) -> Iterator[Observation]:
    lines = _loss_lines(step)
    logarithms = _logarithms(lines)
    first = {where: max(several, key=lambda row: row[0].name in _LOSSES) for where, several in lines.items()}
    before = {where: _line_above(step, row[0], logarithms) for where, row in first.items()}
    for where, several in lines.items():
        if before[where]:
            continue  # a likelihood of log-probabilities that another line made: that one is named
        call, operator, _ = first[where]
        made = step.recorder.trace.producer(call.ins[0])
        source = step.report.operators[made.index].where if made is not None else ""
        later = [one for one, above in before.items() if above == where]
        yield observed(
            "loss-16bit",
            operator,
            also=(*((source,) if source != where else ()), *later),
            error=max(m.error for _, _, m in several),
            gradient=max(step.behind.get(c.seq, 0.0) for c, _, _ in several),
            autocast=_by_autocast(step, call),
            classes=operator.shapes[0][-1] if call.name in _OF_CLASSES and operator.shapes[0] else 1,
            to=low_of(operator) or "rounded fp32",
        )


def _cancels(step: Step, call: Call) -> bool:
    """Say whether a value is that of a sum whose terms cancel, of which nothing is left to compare."""

    def passes(above: Call) -> bool:
        return step.report.operators[above.index].cls in ("view", "cast", "pointwise", "loss")

    found = (step.measures.get(above.index) for i in call.ins for above in step.recorder.trace.above(i, passes))
    return any(one is not None and one.figures.get("whole", 0.0) > 3 * one.error for one in found)


def _line_above(step: Step, call: Call, losses: Collection[str]) -> str:
    """Return the line of a loss that something is made of, up to the products; empty for none."""
    operators = step.report.operators

    def passes(above: Call) -> bool:
        return operators[above.index].cls not in ("gemm", "conv", "attention", "random", "collective", "opaque")

    mine, trace = operators[call.index].where, step.recorder.trace
    lines = (operators[above.index].where for value in call.ins for above in trace.above(value, passes, depth=8))
    return next((line for line in lines if line != mine and line in losses), "")


def _by_autocast(step: Step, call: Call) -> bool:
    """Say whether values are in 16 bits because autocast multiplied weights that are kept in more."""
    trace = step.recorder.trace
    for above in trace.above(call.ins[0], lambda c: c.name not in ("mm", "addmm", "bmm", "convolution"), depth=12):
        if above.name in ("mm", "addmm", "bmm", "convolution"):
            made = [trace.producer(index) for index in above.ins]
            return any(
                one is not None and one.name in ("_to_copy", "t") and any(v.dtype == "fp32" for v in _roots(step, one))
                for one in made
            ) and not _cast_by_hand(step, call, above)
    return False


def _roots(step: Step, call: Call) -> list[Value]:
    """Return the values that a chain of casts and transposes begins with."""
    trace, seen = step.recorder.trace, list[Value]()
    for above in (call, *trace.above(call.ins[0], lambda c: c.name in ("t", "_to_copy", "transpose"), depth=4)):
        seen += step.values(above)
    return [value for value in seen if value.origin == "parameter"]


def _cast_by_hand(step: Step, call: Call, product: Call) -> bool:
    """Say whether what a product gave in FP32 was cast to 16 bits afterwards."""
    return any(value.dtype == "fp32" for value in step.recorder.trace.outputs(product)) and call is not product


# --- routers ---------------------------------------------------------------------------------------------------------
def _routers(step: Step) -> Iterator[Observation]:
    told: set[str] = set()
    for call, operator, measure in step.rows:
        if "changed" not in measure.figures or operator.phase != "forward" or operator.where in told:
            continue
        if not any(reader.index in step.trained for reader in step.recorder.trace.consumers().get(call.outs[-1], ())):
            continue  # a prediction that is counted, a maximum whose place nobody asks for
        told.add(operator.where)
        gate = next(
            (c for c in step.recorder.trace.above(call.ins[0], lambda c: c.name not in ("mm", "addmm", "bmm"), depth=12)
             if c.name in ("mm", "addmm", "bmm")), None
        )  # fmt: skip
        where = step.report.operators[gate.index].where if gate is not None else ""
        dtype = low_of(step.report.operators[gate.index]) if gate is not None else low_of(operator)
        auto = gate is not None and _by_autocast(step, call)
        yield observed(
            "router-16bit", operator, where=where, also=(operator.where,), to=dtype, autocast=auto, **measure.figures
        )


# --- written by hand -------------------------------------------------------------------------------------------------
def _patterns(step: Step) -> Iterator[Observation]:
    errors: dict[tuple[str, str], float] = {}
    rows = [(c, o, m) for c, o, m in step.rows if o.phase == "forward" and o.pattern in _PATTERNS and low_of(o)]
    for _, operator, measure in rows:
        key = operator.pattern, operator.module
        errors[key] = max(errors.get(key, 0.0), measure.error)
    told = {("logsumexp", where) for where in _told(step)}
    for call, operator, _ in rows:
        key = operator.pattern, operator.where
        if call.name in REDUCES and key not in told and any(one in LOW for one in operator.dtypes):
            told.add(key)
            yield observed(
                _PATTERNS[operator.pattern],
                operator,
                error=errors[operator.pattern, operator.module],
                gradient=step.behind.get(call.seq, 0.0),
                what=operator.pattern.replace("_", " "),
                to=low_of(operator),
            )


def _lines(step: Step) -> Iterator[Observation]:
    """Lines whose result has an error that what they were given had not: sums, cancellations."""
    lines: dict[str, _Rows] = {}
    told, said = _told(step), {o.where for c, o, m in step.rows if m.overflowed and c.phase == "update"}
    for call, operator, measure in step.rows:
        # of rounded values in FP32 digits are lost where they cancel; another model's optimizer may step in a forward
        counts = bool(low_of(operator)) or (call.phase != "update" and call.name in ("sub", "rsub", *REDUCES))
        counts = counts and call.phase in ("forward", "update") and bool(operator.where) and not operator.pattern
        # the one rounding of a cast loses nothing of this kind
        if counts and operator.cls != "cast" and measure.error > 0 and not _cancels(step, call):
            lines.setdefault(operator.where, []).append((call, operator, measure))
    for where, several in lines.items():
        call, operator, measure = max(several, key=lambda row: row[2].error)
        given = max((step.measures[i].error for i in _other_lines(step, several, where)), default=0.0)
        quiet = where in said or operator.cls in ("loss", "softmax", "view", "norm")
        least = _DIFFERENCE if call.name in ("sub", "rsub") else LOST
        if (
            not (low_of(operator) or measure.before)
            or measure.error < least
            or measure.error < 3 * given
            or quiet
            or call.name in _QUIET
            or _line_above(step, call, told if call.phase == "forward" else said)
            or "distinct" in measure.figures
            or step.is_of_positions(call)
        ):
            continue
        said.add(where)
        adds = sum(c.name in _ADDS for c, _, _ in several)
        grows = any(value.grad for c, _, _ in several for value in step.recorder.trace.outputs(c))
        plain = not any(c.name in ("sub", "rsub") for c, _, _ in several)  # a polynomial is not a running sum
        runs = adds >= 3 and plain and not grows and call.module == SCRIPT
        code = "accumulator-16bit" if runs else "reduction-16bit"
        yield observed(
            code,
            operator,
            error=measure.error,
            gradient=step.behind.get(call.seq, 0.0),
            adds=adds,
            to=low_of(operator) or "rounded fp32",
            trained=call.index in step.trained,
            logged=step.is_logged(call),
        )


def _other_lines(step: Step, several: _Rows, where: str) -> Iterator[int]:
    """Yield the calls of other lines that a line reads, views of what they made left out."""
    operators = step.report.operators

    def passes(above: Call) -> bool:
        return operators[above.index].where == where or operators[above.index].cls == "view"

    for call, _, _ in several:
        for index in call.ins:
            for made in step.recorder.trace.above(index, passes):
                if made.index in step.measures and operators[made.index].where != where:
                    yield made.index


# --- sums that are kept ----------------------------------------------------------------------------------------------
def _accumulators(step: Step) -> Iterator[Observation]:
    adds: dict[tuple[str, int], _Rows] = {}
    for call, operator, measure in step.rows:
        own = "AccumulateGrad" in call.node
        if call.name not in _ADDS or not (own or call.module == SCRIPT) or not call.ins:
            continue
        to = step.recorder.trace.values[call.ins[0]]
        if to.dtype in LOW and not to.grad and call.op.endswith("_"):
            line = "gradient" if own and operator.where in ("", *step.backward_at) else operator.where
            adds.setdefault((line, to.storage), []).append((call, operator, measure))
    told = set[str]()
    for (where, _), several in sorted(adds.items(), key=lambda row: -row[1][-1][2].error):
        if len(several) < 3 or where in told:
            continue
        told.add(where)
        call, operator, last = several[-1]
        place = (step.backward_at[-1] if step.backward_at else "") if where == "gradient" else where
        count = len(several) + (where == "gradient")
        logged, low = step.is_logged(call), operator.dtypes[0]
        yield observed("accumulator-16bit", operator, where=place, error=last.error, adds=count, logged=logged, to=low)


def _statistics(step: Step) -> Iterator[Observation]:
    told: set[str] = set()
    buffers = [v for v in step.recorder.trace.values if v.origin == "buffer" and v.dtype in LOW]
    storages = {v.storage: v.name for v in reversed(buffers)}  # the first of a storage has the name
    for call, operator, measure in step.rows if storages else ():
        kept = [v for v in step.values(call) if v.origin == "buffer" and v.dtype in LOW]
        into = [v for v in step.values(call)[:1] if v.storage in storages]
        if operator.phase != "forward" or measure.unchanged is None or not (kept or into) or operator.where in told:
            continue
        told.add(operator.where)
        yield observed(
            "statistics-16bit",
            operator,
            unchanged=measure.unchanged,
            error=measure.error,
            table=storages.get((kept or into)[0].storage, ""),
            to=(kept or into)[0].dtype,
        )


# --- range, wide parts -----------------------------------------------------------------------------------------------
def _range(step: Step) -> Iterator[Observation]:
    eps_told: set[str] = set()
    for call, operator, measure in step.rows:
        if measure.figures.get("eps") and operator.where not in eps_told and call.phase in ("forward", "update"):
            eps_told.add(operator.where)
            yield observed("eps-zero", operator, eps=measure.figures["eps"], to=low_of(operator), what=call.name)
    for call, operator, measure in step.rows:
        if measure.overflowed and not (call.phase == "backward" and step.scaled):
            logged, to = step.is_logged(call), low_of(operator)
            yield observed("overflow-16bit", operator, overflowed=measure.overflowed, logged=logged, to=to)
            return


def _unscaled(step: Step) -> Iterator[Observation]:
    behind = [
        o for o in step.report.operators if o.phase == "backward" and "fp16" in o.dtypes and o.cls in ("gemm", "conv")
    ]
    if step.scaled or not behind:
        return
    first = next(
        (o for o in step.report.operators if o.phase == "forward" and "fp16" in (*o.dtypes, *o.out_dtypes)), behind[0]
    )
    cast = step.cast("fp16")
    yield observed(
        "fp16-unscaled",
        first,
        where=cast,
        also=(first.where,) if cast else (),
        what="the step",
        flushed=max((m.figures.get("flushed", 0.0) for _, _, m in step.rows), default=0.0),
    )


def _wide(step: Step) -> Iterator[Observation]:
    for kind in ("fp64", "complex"):

        def is_wide(dtype: str, kind: str = kind) -> bool:
            return dtype.startswith(kind)

        # an accuracy in FP64 is nobody's cost: what counts is what the loss is made of
        forward = [o for i, o in enumerate(step.report.operators) if o.phase == "forward" and i in step.trained]
        wide = [o for o in forward if any(map(is_wide, o.out_dtypes))]
        parts = [o for o in wide if any(shape not in ((), (1,)) for shape in o.out_shapes)]
        computing = [o for o in parts if o.cls not in _CARRIES]
        if not computing:
            continue  # numbers that come in wide and are cast before anything is computed
        first = next((o for o in parts if not any(map(is_wide, o.dtypes))), parts[0])
        held = (v for v in step.recorder.trace.values if v.origin in ("parameter", "buffer"))
        cast = step.cast(kind) if any(is_wide(value.dtype) for value in held) else ""
        flops = sum(o.flops for o in step.report.operators if any(map(is_wide, o.dtypes)))
        share = flops / step.report.total_flops if step.report.total_flops else 0.0
        to = next(d for d in first.out_dtypes if is_wide(d))
        also = (first.where,) if cast and cast != first.where else ()
        yield observed("wide-part", first, where=cast, also=also, count=len(computing), share=share, to=to)


_LOOKS: tuple[Callable[[Step], Iterator[Observation]], ...] = (
    _losses,
    _routers,
    _patterns,
    _accumulators,
    _lines,
    _statistics,
    _range,
    _unscaled,
    _wide,
)
