"""Positions, and the angles made of them, that 16 bits cannot tell apart: rotary and sinusoidal tables, distances."""

from __future__ import annotations

from collections.abc import Iterator

from autoprec.graph.analysis.modules import ModelNames
from autoprec.graph.census import Observation
from autoprec.graph.trace import Call, Value, dtype_name
from autoprec.trial.inside.judging.forward import HALF_ULP, LOST, LOW, Step, low_of, observed
from autoprec.trial.inside.judging.held import collapsed_tables


def positions(step: Step) -> Iterator[Observation]:
    """Yield the first line of each row of positions that are not distinct, with the lines that follow from it.

    Where there is none, the first line whose angles are off because a table is in 16 bits.
    """
    waves = [(c, o, m) for c, o, m in step.rows if c.name in ("sin", "cos") and c.phase == "forward"]
    error = max((m.error for _, _, m in waves), default=0.0)
    operators = step.report.operators
    for index in dict.fromkeys(step.collapsed.values()):
        operator, figures = operators[index], step.measures[index].figures
        dtype = next((one for one in operator.out_dtypes if one in LOW), "")
        made = {operators[one].where: None for one, first in step.collapsed.items() if first == index}
        made.pop(operator.where)
        where = dict.fromkeys((*made, *(o.where for _, o, m in waves if m.error > LOST and o.where != operator.where)))
        yield observed(
            "positions-16bit",
            operator,
            also=(*where, step.cast(dtype)),
            wave_error=error,
            to=dtype,
            derived=len(made),
            **figures,
        )
    for call, operator, measure in () if step.collapsed else waves:
        table = _low_table(step, call)
        dtype = low_of(operator) or (table.dtype if table is not None else "")
        angle = measure.figures.get("amax", 0.0) * HALF_ULP.get(dtype, 0.0)
        if angle > 0.1:
            name = table.name if table is not None else ""
            cast = (step.cast(dtype),)
            yield observed("angles-16bit", operator, also=cast, angle=angle, table=name, to=dtype, error=measure.error)
            return


def tables(step: Step, names: ModelNames) -> Iterator[Observation]:
    """Yield the first positional table of each dtype whose rows are not distinct, with the lines of its likes."""
    alike: dict[str, list[tuple[str, str, int, int]]] = {}
    for name, table, distinct, rows in collapsed_tables(names):
        dtype = dtype_name(table.dtype)
        alike.setdefault(dtype, []).append((names.defined_at(name) or step.cast(dtype), name, distinct, rows))
    for dtype, found in alike.items():
        where, name, distinct, rows = found[0]
        to = dtype if dtype in LOW else f"fewer bits than {dtype}"
        figures = {"distinct": distinct, "positions": rows, "to": to, "table": name, "tables": len(found)}
        also = tuple(dict.fromkeys(at for at, *_ in found if at not in ("", where)))
        yield Observation("positions-16bit", where, "", name, (dtype,), figures, also)


def _low_table(step: Step, call: Call) -> Value | None:
    """Return a 16-bit buffer from which an angle comes; None where there is none."""
    for above in (call, *step.recorder.trace.above(call.ins[0], step.carries, depth=14)):
        for value in step.values(above):
            if value.origin == "buffer" and value.dtype in LOW:
                return value
    return None
