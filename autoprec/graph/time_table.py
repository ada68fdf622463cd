"""Where the time of a training step goes: the step on the clock, and each class of operators inside it.

The operators are timed by torch's profiler, the step without it: shares are those of the profiled steps, their sum is
the step as it runs. What profiled steps take beyond their operators is Python, the dispatcher, waiting and the profiler
itself.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from autoprec.graph.analysis.rules import builtin_rules
from autoprec.graph.report import DATA, MULTIPLYING, OPTIMIZER, GraphReport, OperatorTime, OperatorTimes
from autoprec.graph.summary import attending, class_name, has_fused_attention, has_images, has_large_vocabulary
from autoprec.graph.trace import bare_name
from autoprec.policy.sections import PRODUCTS

#: What torch.compile makes of operators, by the beginnings of the profiler's names.
_COMPILED = ("Torch-Compiled Region", "CompiledFunction", "## Call CompiledFxGraph", "triton_", "mkldnn::", "mkl::")
_BETWEEN = "between operators"
_PRODUCTS = "optimizer: matrix products"
_CHOICES = {
    "data loading": "none: the script's own",
    OPTIMIZER: "optimizer: the dtypes of its state",
    _PRODUCTS: "none: they are too small to gain in another dtype",
    "compiled code": "activations, and a recipe for each layer",
    _BETWEEN: "execution: compile takes part of it away",
}


@dataclass(frozen=True, slots=True)
class TimeShare:
    """A row of the table of times: a class of operators, its ms, its share of the step, and what it offers."""

    name: str
    ms: float
    share: float
    choice: str


def time_shares(times: OperatorTimes, report: GraphReport) -> list[TimeShare]:
    """Return where the time of a step goes, by class of operators, the longest first; the rows add up to the step.

    An operator that serves several classes (``aten::bmm`` in attention and in experts) is split by their FLOPs.

    Args:
        times: of the operators.
        report: of the same step: it knows what an operator is for.
    """
    served = _served(report)
    found: Counter[str] = Counter()
    for row in times.operators:
        for name, share in _classes(row, served).items():
            found[name] += row.ms * share  # type: ignore[assignment]
    operators = sum(found.values())
    found[_BETWEEN] += max(times.profiled_ms - operators, 0.0)  # type: ignore[assignment]
    total = max(times.profiled_ms, operators) or 1.0  # of two threads, operators can take more than the step
    scale = times.step_ms / total
    rows = [TimeShare(name, ms * scale, ms / total, choice_of(name, report)) for name, ms in found.items()]
    return sorted(rows, key=lambda row: -row.ms)


def choice_of(name: str, report: GraphReport) -> str:
    """Return which entry of a policy decides about a class of :func:`time_shares`, or why none does.

    Args:
        name: of the class.
        report: of the step.
    """
    if name == OPTIMIZER and report.can_fuse:
        return f"{_CHOICES[name]}; update: fused"
    if name == _PRODUCTS and (to := [dtype for dtype in PRODUCTS if report.movable(dtype)]):
        return f"optimizer.products: {', '.join(to)}{', on a CPU without bf16' if 'fp32' in to else ''}"
    if name in _CHOICES:
        return _CHOICES[name]
    choice = builtin_rules().classes["attention" if name == "product" else name].choice
    if name == "attention":
        said = "" if has_fused_attention(report) else ": it is written out already"
        return f"{choice}; implementation.attention{said}"
    if name == "pointwise" and report.gelus_by_hand:
        return f"{choice}; implementation.gelu"
    if name == "conv" and has_images(report):
        return f"{choice}; implementation.layout"
    return f"{choice}; implementation.loss" if name == "loss" and has_large_vocabulary(report) else choice


def _served(report: GraphReport) -> dict[str, Counter[str]]:
    """Return the classes of each operator of the recorded step, by FLOPs, or by bytes where it has none."""
    attends = attending(report)
    served: dict[str, Counter[str]] = {}
    for operator in report.operators:
        weight = operator.flops or operator.bytes or 1
        served.setdefault(bare_name(operator.op), Counter())[class_name(operator, attends)] += weight
    return served


def _classes(row: OperatorTime, served: dict[str, Counter[str]]) -> dict[str, float]:
    """Return the classes that a timed operator belongs to, with shares that add up to 1."""
    if row.part == DATA:
        return {"data loading": 1.0}
    cls = builtin_rules().class_of(row.op)
    if row.part == OPTIMIZER:
        return {_PRODUCTS if bare_name(row.op) in MULTIPLYING else OPTIMIZER: 1.0}
    known = served.get(bare_name(row.op))
    if known:
        total = sum(known.values())
        return {name: weight / total for name, weight in known.items()}
    if cls is not None:
        return {cls: 1.0}
    if row.op.startswith(_COMPILED):
        return {"compiled code": 1.0}
    return {"opaque" if row.op.count("::") == 1 and not row.op.startswith("torch::") else _BETWEEN: 1.0}
