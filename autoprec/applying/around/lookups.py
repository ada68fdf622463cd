"""GLM-130B's embedding gradient shrink: what comes back to a look-up counts for a part only.

Early in the training of a large model the gradient of the embedding is some orders of magnitude larger than that of any
other layer, and its spikes come before those of the loss (GLM-130B, arXiv 2210.02414, section 2.2). GLM-130B computes
``x = x * alpha + x.detach() * (1 - alpha)`` with ``alpha = 0.1`` behind its word embedding: the forward is as it was,
the gradient is ``alpha`` times as large. Here the multiplication stands alone, behind each look-up, so that the forward
is so to the bit; the gradient that a tied output layer adds to the same table is left as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

#: What looks rows up -> the position of the table, and of what a bag's rows are multiplied by (None: it has none).
LOOKUPS: dict[Callable[..., Any], tuple[int, int | None]] = {
    F.embedding: (1, None),
    torch.embedding: (0, None),
    F.embedding_bag: (1, 8),
    torch.embedding_bag: (0, 6),
}


class _Shrink(torch.autograd.Function):
    """Returns its first input; of the gradient ``share`` goes to that one, and all of it to ``beside``, if any."""

    generate_vmap_rule = True

    @staticmethod
    def forward(out: Tensor, _beside: Tensor | None, _share: float) -> Tensor:
        return out.clone()  # a view could not be changed in place

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor | None, float], output: Tensor) -> None:  # noqa: ARG004
        ctx.share, ctx.alone = inputs[2], inputs[1] is None

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, Tensor | None, None]:
        return grad_output * ctx.share, None if ctx.alone else grad_output, None


def table_of(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Return the table ``[rows, features]`` of a look-up.

    Args:
        func: one of :data:`LOOKUPS`.
        args, kwargs: of the call.
    """
    at = LOOKUPS[func][0]
    table: Tensor = args[at] if len(args) > at else kwargs["weight"]
    return table


def look_up(
    run: Callable[[tuple[Any, ...], dict[str, Any]], Any],
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    share: float,
) -> Any:
    """Look rows up, and let ``share`` of their gradient through to the table; other operands get all of theirs.

    Args:
        run: computes ``func`` of arguments.
        func: one of :data:`LOOKUPS`.
        args, kwargs: of the call.
        share: of the gradient, in (0, 1].
    """
    at, beside = LOOKUPS[func]
    table = table_of(func, args, kwargs)
    if not (table.requires_grad and torch.is_grad_enabled()) or torch._C._get_tracing_state() is not None:
        return run(args, kwargs)
    factors = None if beside is None else args[beside] if len(args) > beside else kwargs.get("per_sample_weights")
    alone = None
    if factors is not None and factors.requires_grad:  # their gradient is not the embedding's
        alone = _first(run(*_with(args, kwargs, at, "weight", table.detach())))
        args, kwargs = _with(args, kwargs, beside or 0, "per_sample_weights", factors.detach())
    out = run(args, kwargs)
    shrunk = _Shrink.apply(_first(out), alone, share)  # type: ignore[no-untyped-call]
    return (shrunk, *out[1:]) if isinstance(out, tuple) else shrunk


def _first(out: Any) -> Any:
    return out[0] if isinstance(out, tuple) else out


def _with(
    args: tuple[Any, ...], kwargs: dict[str, Any], at: int, name: str, value: Tensor
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call with one replaced."""
    if len(args) > at:
        return (*args[:at], value, *args[at + 1 :]), kwargs
    return args, kwargs | {name: value}
