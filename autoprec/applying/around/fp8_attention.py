"""Calls of ``scaled_dot_product_attention`` in FP8, where a policy says ``operators.attention: fp8``.

On a GPU Transformer Engine runs them, elsewhere (and under the ``emulated`` backend) torch's operators emulate them.
What has no equivalent there is refused when it is called: a mask other than causal, dropout, odd sizes. In evaluation
mode attention runs as the script wrote it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from autoprec.backends import Backend, get
from autoprec.backends.emulated import fp8_attention
from autoprec.errors import UnsupportedError
from autoprec.numerics.sharded import is_dtensor
from autoprec.precision.hardware import attention_refusal

if TYPE_CHECKING:
    from autoprec.backends.te_state import EngineAttention

_WHERE, _FIX = "operators.attention", "set operators.attention to keep, bf16 or fp16"


@dataclass(frozen=True, slots=True)
class Fp8Attention:
    """What runs the calls: an engine on a device of some compute capability, or without one the emulation."""

    engine: EngineAttention | None = None
    capability: tuple[int, int] = (0, 0)

    @property
    def note(self) -> str:
        """What an audit says of it."""
        if self.engine is None:
            return "emulated: true numerics, no 8-bit speed"
        return "by Transformer Engine, between compiled graphs"

    def begin(self) -> None:
        """Say that a forward of the model begins."""
        if self.engine is not None:
            self.engine.begin()

    def __call__(self, device: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """Answer a call of SDPA, in the dtype that SDPA would return.

        Raises:
            UnsupportedError: it has no FP8 equivalent; the message says why.
        """
        query, key, value, mask, dropout, causal, scale, grouped = _arguments(*args, **kwargs)
        refused = self._refusal(query, key, value, mask, dropout, causal, grouped)
        if refused:
            raise UnsupportedError(f"FP8 attention: {refused}", where=_WHERE, fix=_FIX)
        autocast = torch.is_autocast_enabled(device)
        wanted = torch.get_autocast_dtype(device) if autocast else query.dtype
        # the kernel casts from 16 bits
        narrow = wanted if wanted in (torch.bfloat16, torch.float16) else torch.bfloat16
        operands = [x.to(narrow) for x in (query, key, value)]
        scale = 1.0 / math.sqrt(query.shape[-1]) if scale is None else float(scale)
        with torch.autocast(device, enabled=False):
            run: Callable[..., Tensor] = fp8_attention if self.engine is None else self.engine.run
            return run(*operands, causal=causal, scale=scale).to(wanted)

    def _refusal(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        dropout: float,
        causal: bool,
        grouped: bool,
    ) -> str:
        if mask is not None:
            return "a call with attn_mask; only is_causal=True or no mask at all has a kernel"
        if dropout:
            return f"a call with dropout {dropout:g} has no kernel"
        if any(is_dtensor(x) or x.is_nested for x in (query, key, value)):
            return "operands are DTensors or nested tensors"
        if not torch.compiler.is_compiling() and torch._C._functorch.peek_interpreter_stack() is not None:
            return "the transforms of torch.func (grad, vmap, jvp, ...) do not go through it"
        if not query.ndim == key.ndim == value.ndim == 4:
            return "operands are not [batch, heads, length, head]"
        if causal and query.shape[2] != key.shape[2]:
            return f"a causal call of {query.shape[2]} queries and {key.shape[2]} keys"
        heads, groups = query.shape[1], key.shape[1]
        if groups != value.shape[1] or (groups != heads and (not grouped or heads % groups)):
            return f"{heads} heads of queries, {groups} of keys and {value.shape[1]} of values"
        sizes = (query.shape[-1], value.shape[-1])
        if self.engine is not None:
            return attention_refusal(sizes, self.capability)
        return next((f"a head dimension of {size}, no multiple of 16" for size in sizes if size % 16), "")


def _arguments(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> tuple[Any, ...]:
    """Return the arguments of a call of SDPA, in order."""
    return query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa


def bind_attention(device: str, named: str, backends: Iterable[Backend]) -> tuple[Fp8Attention, tuple[Backend, ...]]:
    """Return what runs FP8 attention on a device, and the backend that it needs around the model, if any.

    Args:
        device: where the model is.
        named: the backend that was asked for; ``emulated`` emulates attention, too.
        backends: those that run layers already: Transformer Engine has one state for both.

    Raises:
        UnsupportedError: nothing can run it on this GPU.
    """
    if not device.startswith("cuda") or named == "emulated":
        return Fp8Attention(), ()
    from autoprec.backends.transformer_engine import TransformerEngineBackend

    found = next((one for one in backends if isinstance(one, TransformerEngineBackend)), None)
    backend = found or get("transformer_engine")
    able = backend.available(device)
    if not able or not isinstance(backend, TransformerEngineBackend):
        raise UnsupportedError(f"FP8 attention runs by Transformer Engine: {able.reason}", where=_WHERE, fix=_FIX)
    capability = torch.cuda.get_device_capability(device)
    refused = attention_refusal((), capability)
    if refused:
        raise UnsupportedError(refused, where=_WHERE, fix=_FIX)
    return Fp8Attention(backend.attention(), capability), (backend,)
