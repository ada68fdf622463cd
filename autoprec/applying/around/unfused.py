"""Scaled dot-product attention as two products and a softmax: ``implementation: {attention: unfused}``.

torch's fused kernel never writes scores and probabilities, tokens times tokens for each head, to memory; where its
inner products are slower than those of a library, it loses all the same. On a CPU with AVX512_BF16 and no AMX it takes
1.4 to 5.7 times as long in bfloat16 as what is written out here (forward and backward, up to 512 tokens). Where it
cannot run, because of dropout, torch writes attention out as well, in float32.

Scores and probabilities are stored in the dtype of queries, keys and values, in 16 bits; a softmax computes in float32
inside. Dropout draws the random numbers that torch's attention draws.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from autoprec.policy.sections import MOST_SCORES

_NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")


def may_be_unfused(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Say whether a call of ``F.scaled_dot_product_attention`` is one that can be written out.

    Args:
        args, kwargs: of the call.
    """
    given = dict(zip(_NAMES, args, strict=False)) | kwargs
    tensors: list[Any] = [given.get(name) for name in _NAMES[:4] if given.get(name) is not None]
    plain = all(isinstance(each, Tensor) and not each.is_nested for each in tensors)
    return (
        plain
        and len(tensors) >= 3
        and min(each.ndim for each in tensors) >= 2
        and tensors[0].shape[-2] * tensors[1].shape[-2] <= MOST_SCORES
        and 0.0 <= (dropout := given.get("dropout_p", 0.0)) < 1.0
        and not (dropout and torch.compiler.is_compiling())  # Inductor draws other numbers in another graph
        and not (given.get("is_causal") and len(tensors) == 4)  # which torch refuses
        and (torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack() is None)
    )


def unfused_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Return what ``F.scaled_dot_product_attention`` returns; same arguments.

    Args:
        query: ``[..., heads, L, D]``.
        key: ``[..., heads, S, D]``, of fewer heads with ``enable_gqa``.
        value: ``[..., heads, S, V]``, likewise.
        attn_mask: what may be attended to (bool), or what is added to the scores; broadcast to ``[..., heads, L, S]``.
        dropout_p: share of the probabilities that are zero.
        is_causal: a token attends to itself and to those before it.
        scale: of the scores; None is ``1 / sqrt(D)``.
        enable_gqa: heads of queries share those of keys and values.

    Returns:
        ``[..., heads, L, V]``, zero where a token may attend to nothing.
    """
    if enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
        value = value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    scores = (query * factor) @ key.transpose(-2, -1)
    nothing = None
    if is_causal:
        least = torch.finfo(scores.dtype).min
        scores += torch.full(scores.shape[-2:], least, dtype=scores.dtype, device=scores.device).triu(1)
    elif attn_mask is not None:
        added, nothing = _added(attn_mask, scores.dtype)
        scores = scores + added
    weights = F.softmax(scores, -1)
    if dropout_p:
        # the factor of what is kept is exact behind the product, where 16 bits would round it before
        weights = weights * torch.empty_like(weights).bernoulli_(1.0 - dropout_p)
        out = (weights @ value) * (1.0 / (1.0 - dropout_p))
    else:
        out = weights @ value
    return out if nothing is None else out.masked_fill(nothing, 0.0)


def _added(mask: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Return what a mask adds to scores, and ``[..., L, 1]``: which tokens attend to nothing; None where all do."""
    if mask.dtype is torch.bool:
        nothing = ~mask.any(-1, keepdim=True)
        least = torch.finfo(dtype).min
        added = torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, least)
    else:
        added = mask.to(dtype)
        nothing = (added == -torch.inf).all(-1, keepdim=True)
    if mask.device.type == "cpu" and not torch.compiler.is_compiling() and not nothing.any():
        return added, None
    return added.masked_fill(nothing, 0.0), nothing
