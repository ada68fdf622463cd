"""The operator graph of one training step: which operators ran, how sensitive each is, which layers can be decided.

A step is a list of operator calls in the order they ran: forward, backward, and what checkpointing recomputes in
between. One weighted layer is three GEMMs of it: fprop ``[tokens, in] x [in, out]``, dgrad (the gradient of its
input) and wgrad (the gradient of its weight). The recorder watches one real step and keeps, of each call, its shapes,
dtypes, module and autograd's sequence number, which is what ties a backward GEMM to its layer. Rules then give every
operator a class: GEMMs and convolutions with a weight are *tunable*; softmax, norms and losses stay in fp32, since
long sums and exponentials lose in 8 mantissa bits; everything elementwise follows its inputs. Norms and softmaxes
that are written out by hand are recognised by who feeds whom.

    from autoprec.graph import record_step
    report = record_step(model, lambda: loss(model(x), y).backward())

Importing this package imports no torch: reports are plain data, and the rest is loaded when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from autoprec.support.lazy import names_on_use

if TYPE_CHECKING:
    from autoprec.graph.audit import executed_precisions
    from autoprec.graph.recorder import StepRecorder, record_step
    from autoprec.graph.report import GraphReport, load_report

__all__ = [
    "GraphReport",
    "StepRecorder",
    "executed_precisions",
    "load_report",
    "record_step",
]

__getattr__ = names_on_use(
    __name__,
    {
        "GraphReport": "report",
        "StepRecorder": "recorder",
        "executed_precisions": "audit",
        "load_report": "report",
        "record_step": "recorder",
    },
)
