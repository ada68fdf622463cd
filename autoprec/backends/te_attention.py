"""Transformer Engine's FP8 attention for calls of ``scaled_dot_product_attention``; never run on a GPU here.

One ``te.DotProductAttention`` for each call of a forward, in order: it remembers the scales of the step before. On
compute capability 9.0 its kernel trains with delayed scales alone, and under every other recipe the scores' scales are
delayed as well (TE 2.20, ``get_attention_backend``, ``init_fp8_metadata``): the recipe is delayed everywhere, with a
history of one step. Its scales begin at one, in a resumed run too: gradients of the first step may round to zero.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch._compile import _disable_dynamo

from autoprec.backends.te_state import EngineState
from autoprec.errors import UnsupportedError
from autoprec.numerics.linear import in_backward
from autoprec.support.optional import require

__all__ = ["EngineAttention"]

_FIX = "set operators.attention to keep, bf16 or fp16"


class EngineAttention:
    """The attention of one model: modules by the order of calls, and the recipe they run under."""

    def __init__(self, state: EngineState, purpose: str) -> None:
        recipes = require("transformer_engine.common.recipe", purpose=purpose)
        self.recipe: Any = recipes.DelayedScaling(
            fp8_format=recipes.Format.HYBRID, amax_history_len=1, amax_compute_algo="most_recent", fp8_dpa=True
        )
        self._state, self._calls = state, 0
        self._modules: dict[tuple[Any, ...], Any] = {}

    def __deepcopy__(self, _memo: dict[int, Any]) -> EngineAttention:
        """Return itself: a copy of a model runs by the same modules, and so with the scales of the original."""
        return self

    @_disable_dynamo
    def begin(self) -> None:
        """Count the calls of a forward anew."""
        self._calls = 0

    @_disable_dynamo
    def run(self, query: Tensor, key: Tensor, value: Tensor, *, causal: bool, scale: float) -> Tensor:
        """Attend; shapes as in :func:`autoprec.numerics.attention.fp8_attention`, bfloat16 or float16.

        Raises:
            UnsupportedError: TE has no kernel for this call, or the call repeats an earlier one (checkpointing).
        """
        if in_backward():
            raise UnsupportedError(
                "FP8 attention under activation checkpointing: its scales are counted by calls, and a repeated one "
                "would change them",
                where="operators.attention",
                fix=_FIX,
            )
        batch, heads, length, _ = query.shape
        shape = (heads, key.shape[1], query.shape[-1], value.shape[-1], length == key.shape[2], causal, scale)
        module = self._modules.get((self._calls, *shape))
        if module is None:
            module = self._modules[(self._calls, *shape)] = self._made(*shape)
        self._calls += 1
        operands = [x.transpose(1, 2).contiguous() for x in (query, key, value)]
        try:
            with self._state.entered(self.recipe):
                out: Tensor = module(*operands)
        except ValueError as error:  # no kernel for these sizes; NVTE_DEBUG=1 NVTE_DEBUG_LEVEL=2 tells why
            raise UnsupportedError(f"Transformer Engine: {error}", where="operators.attention", fix=_FIX) from error
        if not (module.fp8 and module.fp8_meta["recipe"].fp8_dpa):  # NVTE_DPA_FP8_RECIPE=F16 turns it off
            raise UnsupportedError(
                "Transformer Engine ran attention in 16 bits (is NVTE_DPA_FP8_RECIPE set?)",
                where="operators.attention",
                fix=_FIX,
            )
        self._state.watch(out)
        return out.view(batch, length, heads, value.shape[-1]).transpose(1, 2)

    def _made(self, heads: int, groups: int, head: int, out: int, own: bool, causal: bool, scale: float) -> Any:
        return self._state.te.DotProductAttention(
            heads,
            (head, out),
            num_gqa_groups=groups,
            attention_dropout=0.0,
            qkv_format="bshd",
            attn_mask_type="causal" if causal else "no_mask",
            attention_type="self" if own else "cross",
            softmax_scale=scale,
        )
