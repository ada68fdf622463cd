"""Recurrent layers under autocast that keep their state, and so their gates, in FP32 while their products are lowered.

The CPU's autocast casts the operands of each product. A GRU's state and a cell's begin in the dtype of their input:
with an FP32 one whatever is added to it and multiplied with it is FP32 as well, step by step, and so is the output.
"""

from __future__ import annotations

from collections.abc import Iterator

from autoprec.graph.census import Observation
from autoprec.trial.inside.judging.forward import LOW, Step, observed


def recurrent(step: Step) -> Iterator[Observation]:
    """Yield each recurrent module that ran under autocast to 16 bits and returned FP32."""
    for name, (kind, where, autocast, returned) in step.recorder.recurrent.items():
        own = [o for o in step.report.operators if o.module == name and o.phase == "forward"]
        products = {dtype for o in own if o.cls == "gemm" for dtype in o.dtypes}
        if not products or returned != "fp32" or autocast not in LOW:
            continue
        rest = [o for o in own if o.cls not in ("gemm", "cast", "view", "allocation")]
        wide = sum(o.bytes for o in rest if "fp32" in o.out_dtypes)
        yield observed(
            "recurrent-fp32",
            next(o for o in own if o.cls == "gemm"),
            where=where,
            kind=kind,
            to=autocast,
            products=autocast if autocast in products else "fp32",
            share=wide / (sum(o.bytes for o in rest) or 1),
        )
