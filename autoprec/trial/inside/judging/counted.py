"""What a recorded step reads, reduces and writes beside its weights: rows of the census that no module holds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from torch import Tensor, nn

from autoprec.graph.census import Held
from autoprec.graph.saved import address_of
from autoprec.graph.trace import SCRIPT, Ref, dtype_name
from autoprec.trial.inside.judging.by_hand import UpdateRecorder
from autoprec.trial.inside.judging.forward import LOW, Step


def read_by(step: Step) -> Iterator[Held]:
    """Yield what the step itself reads and keeps: logits, router scores, accumulators, norms of gradients."""
    weights = {value.shape for value in step.recorder.trace.values if value.origin == "parameter"}
    told: set[tuple[str, str]] = set()
    for call, operator in zip(step.calls, step.report.operators, strict=True):
        kind, value = "", call.ins[0] if call.ins else -1
        if call.phase == "forward" and call.name in ("_log_softmax", "log_softmax"):
            kind = "logits"
        elif call.phase == "forward" and call.name == "topk" and call.module != SCRIPT:
            kind = "top-k input"
        elif call.phase == "update" and call.name in ("linalg_vector_norm", "_foreach_norm") and call.outs:
            kind, value = "clipping norm", call.outs[0]
        elif call.op.endswith("add_") and call.module == SCRIPT and value >= 0:
            to = step.recorder.trace.values[value]
            kind = "gradient accumulator" if not to.grad and to.shape in weights and to.origin != "parameter" else ""
        elif operator.cls == "gemm" and operator.phase == "forward" and "router" in _flags(step, operator.module):
            kind, value = "router scores", call.outs[0] if call.outs else -1
        if not kind or value < 0 or (kind, call.where) in told:
            continue
        told.add((kind, call.where))
        seen = step.recorder.trace.values[value]
        yield Held(
            kind,
            call.module if call.module != SCRIPT else call.where,
            seen.dtype,
            seen.shape,
            "fp32" if seen.dtype in LOW else "",
            where=call.where,
        )


def _flags(step: Step, module: str) -> tuple[str, ...]:
    return next((layer.flags for layer in step.report.layers if layer.name == module), ())


def reductions(step: Step) -> Iterator[tuple[str, str]]:
    """Yield line and dtype of what ranks add up after forward."""
    for call in step.calls:
        if call.op.startswith(
            ("c10d::allreduce", "c10d::reduce", "_c10d_functional::all_reduce", "_c10d_functional::reduce")
        ):
            dtypes = {value.dtype for value in step.values(call)}
            if call.phase != "forward":
                yield from (
                    (call.where or (step.backward_at[-1] if step.backward_at else ""), dtype) for dtype in dtypes
                )


def hooked(root: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield what FSDP2 reduces in."""
    for module in root.modules():
        state = getattr(module, "_get_fsdp_state", None)
        policy = getattr(state(), "_mp_policy", None) if callable(state) else None
        dtype = getattr(policy, "reduce_dtype", None) or getattr(policy, "param_dtype", None)
        if dtype is not None:
            yield "fully_shard", dtype_name(dtype)
            return


def copies(update: UpdateRecorder, weights: Sequence[Tensor], others: Iterable[Tensor]) -> Iterator[Held]:
    """Yield copies of the weights that are written between updates: moving averages.

    Args:
        update: the record of what runs then.
        weights: of the model, of any shapes.
        others: what has a weight's shape and is no copy: gradients, an optimizer's state.
    """
    shapes = {tuple(p.shape) for p in weights}
    told = {address_of(one) for one in (*weights, *others)}
    trace, outside = update.trace, update.outside
    names = {value.storage: value.name for value in trace.values if value.name}
    for call in trace.calls:
        if not call.op.endswith("_") or call.name in ("zero", "_foreach_zero", "fill"):
            continue
        first = call.args[0] if call.args else None
        for written in first if isinstance(first, (list, tuple)) else (first,):
            to = trace.values[written.value] if isinstance(written, Ref) else None
            if to is None or to.storage in told or to.storage not in outside or to.shape not in shapes or not to.shape:
                continue
            told.add(to.storage)
            twin = "fp32" if to.dtype in LOW else ""
            yield Held(
                "copy of the weights",
                names.get(to.storage) or call.where,
                to.dtype,
                to.shape,
                twin,
                where=call.where,
            )
