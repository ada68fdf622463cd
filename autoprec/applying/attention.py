"""``nn.MultiheadAttention`` under a policy: its projections run through executions, the rest as torch computes it.

torch multiplies by the projection weights inside one C++-backed function that no hook sees, so the forward is
written out here. What it cannot express (``add_bias_kv``, ``add_zero_attn``) is refused when a policy is applied.

In evaluation ``nn.TransformerEncoderLayer`` hands the weights of all of its layers to one kernel, which would compute
them as the script wrote them: under a policy it calls its layers, as it does in training.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoprec.applying.raw_weights import WeightExecutions

_PARTS = ("q_proj_weight", "k_proj_weight", "v_proj_weight")


def attention_refusal(module: nn.MultiheadAttention) -> str:
    """Return why this attention cannot run under a policy, or an empty string."""
    if module.bias_k is not None or module.bias_v is not None or module.add_zero_attn:
        return "nn.MultiheadAttention with add_bias_kv or add_zero_attn is not supported"
    return ""


class AttentionExecutions(WeightExecutions):
    """The executions of the projections of an ``nn.MultiheadAttention``."""

    module: nn.MultiheadAttention

    def _project(self, name: str, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        execution = self.executions.get(name)
        if execution is None:
            return F.linear(x, weight, bias)
        out: Tensor = execution(x, weight, bias, training=self.module.training)
        return out

    def _inputs(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        m = self.module
        biases: Any = (None, None, None) if m.in_proj_bias is None else m.in_proj_bias.chunk(3)
        if m._qkv_same_embed_dim:
            weight: Tensor = m.in_proj_weight
            if query is key and key is value:
                q, k, v = self._project("in_proj_weight", query, weight, m.in_proj_bias).chunk(3, -1)
                return q, k, v
            parts = weight.chunk(3)
            names = ("in_proj_weight",) * 3
        else:
            parts = (m.q_proj_weight, m.k_proj_weight, m.v_proj_weight)
            names = _PARTS
        streams = (query, key, value)
        q, k, v = (self._project(n, x, w, b) for n, x, w, b in zip(names, streams, parts, biases, strict=True))
        return q, k, v

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Compute what ``nn.MultiheadAttention.forward`` computes; same arguments, same results.

        Args:
            query: ``[L, E]``, ``[L, B, E]``, or ``[B, L, E]`` where the module is ``batch_first``.
            key, value: likewise, with S in the place of L, and the module's ``kdim`` and ``vdim``.
            key_padding_mask: ``[B, S]`` (or ``[S]``), bool or float: what is ignored, or added.
            need_weights: whether the weights are returned.
            attn_mask: ``[L, S]`` or ``[B * heads, L, S]``, bool or float.
            average_attn_weights: whether returned weights are means over the heads.
            is_causal: a hint that ``attn_mask`` is causal.

        Returns:
            The output in the shape of ``query``, and the weights ``[B, L, S]`` or ``[B, heads, L, S]``, or None.
        """
        m = self.module
        batched = query.dim() == 3
        if not batched and key_padding_mask is not None:
            key_padding_mask = key_padding_mask.unsqueeze(0)
        if not batched or not m.batch_first:
            same = key is query, value is query
            turned: Any = partial(torch.transpose, dim0=0, dim1=1) if batched else partial(torch.unsqueeze, dim=0)
            query = turned(query)
            key, value = query if same[0] else turned(key), query if same[1] else turned(value)
        q, k, v = (self._heads(x) for x in self._inputs(query, key, value))
        mask = _merge_masks(attn_mask, key_padding_mask, q, k)
        if mask is None and is_causal:
            causal = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).triu(1)
            mask = torch.zeros_like(causal, dtype=q.dtype).masked_fill_(causal, -math.inf)
        dropout = m.dropout if m.training else 0.0
        weights: Tensor | None = None
        if need_weights:
            scores = (q / math.sqrt(q.shape[-1])) @ k.transpose(-2, -1)
            weights = F.softmax(scores if mask is None else scores + mask, dim=-1)
            out = (F.dropout(weights, dropout) if dropout else weights).to(v.dtype) @ v
            weights = weights.mean(dim=1) if average_attn_weights else weights
        else:
            out = F.scaled_dot_product_attention(q, k, v, mask, dropout)
        # length first, as PyTorch lays it out: a dropout that follows draws its mask in the order of memory, and would
        # fall on other elements than in the script as written
        out = out.permute(2, 0, 1, 3).flatten(2)
        out = self._project("out_proj", out, m.out_proj.weight, m.out_proj.bias)
        if not batched:
            return out.squeeze(1), None if weights is None else weights.squeeze(0)
        return out.transpose(0, 1) if m.batch_first else out, weights

    def _heads(self, x: Tensor) -> Tensor:
        """``[batch, length, embed]`` to ``[batch, heads, length, embed / heads]``."""
        heads = self.module.num_heads
        return x.reshape(*x.shape[:-1], heads, x.shape[-1] // heads).transpose(1, 2)


class EncoderLayerExecutions(WeightExecutions):
    """Installed in an ``nn.TransformerEncoderLayer``, which holds no weight itself: its layers run in evaluation too.

    ``swap`` gives the layer a class that says so where torch asks whether one kernel may run it.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module, {})

    def run(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the layer's forward; of a nested tensor, which an encoder makes of padding, with the padding.

        Args:
            forward: the layer's own.
            args, kwargs: of the call; the first is the input ``[B, L, E]``.
        """
        given = args[0] if args else kwargs["src"]
        if not given.is_nested:
            return forward(*args, **kwargs)
        padded = given.to_padded_tensor(0.0)
        ends = torch.tensor([len(one) for one in given.unbind()], dtype=torch.int64, device=padded.device)
        padding = torch.arange(padded.shape[1], device=padded.device) >= ends[:, None]
        out = forward(padded, src_key_padding_mask=padding)
        return torch._nested_tensor_from_mask(out, padding.logical_not(), mask_check=False)


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype is torch.bool:
        return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, -math.inf)
    return mask.to(dtype)


def _merge_masks(attn_mask: Tensor | None, padding: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """Return one additive mask that broadcasts to ``[batch, heads, queries, keys]``, or None."""
    merged: Tensor | None = None
    if attn_mask is not None:
        merged = _additive(attn_mask, q.dtype)
        if merged.dim() == 3:
            merged = merged.view(q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    if padding is not None:
        wide = _additive(padding, q.dtype)[:, None, None, :]
        merged = wide if merged is None else merged + wide
    return merged
