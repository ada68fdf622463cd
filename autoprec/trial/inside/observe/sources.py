"""Which lines of a script chose a precision before it trains: casts of modules, optimizers, loaded weights."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from autoprec.graph.places import caller
from autoprec.graph.trace import dtype_name
from autoprec.numerics.rounding import SIXTEEN_BIT

#: Casts that are remembered: one of every Parameter of a large model; more say nothing new of a script.
_MOST = 1000


class Sources:
    """What is remembered until the first training step.

    Attributes:
        casts: ``file:line`` and short dtype of every cast of a module to 16 or 64 bits, in order, and of every
            ``set_default_dtype`` in which modules are made in 16 or 64 bits.
        loaded: name -> short dtype of the floating tensors that were last loaded into a module.
    """

    def __init__(self) -> None:
        self.casts: list[tuple[str, str]] = []
        self.loaded: dict[str, str] = {}
        self._optimizers: weakref.WeakKeyDictionary[Optimizer, str] = weakref.WeakKeyDictionary()

    def install(self, replace: Callable[[Any, str, Callable[..., Any]], None]) -> None:
        """Watch casts and loading; ``replace`` patches a function as :meth:`Hooks.replace` does."""
        for name in ("to", "half", "bfloat16", "double"):
            replace(nn.Module, name, self._cast)
        replace(torch, "set_default_dtype", self._default)
        replace(nn.Module, "load_state_dict", self._load)

    def made(self, optimizer: Optimizer) -> None:
        """Remember the line that makes an optimizer."""
        self._optimizers[optimizer] = caller(own=True)

    def of(self, optimizer: Optimizer) -> str:
        """Return the line that made an optimizer; empty where it was not seen."""
        return self._optimizers.get(optimizer, "")

    def _cast(self, original: Any, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        was = _first(module)
        out = original(module, *args, **kwargs)
        to = _first(module)
        if to is not was:
            self._remember(to)
        return out

    def _default(self, original: Any, dtype: torch.dtype) -> Any:
        out = original(dtype)
        self._remember(dtype)
        return out

    def _remember(self, to: torch.dtype | None) -> None:
        """Note the script's line that asked for a dtype, where that is another than FP32."""
        if to in (*SIXTEEN_BIT, torch.float64) and len(self.casts) < _MOST:
            self.casts.append((caller(own=True), dtype_name(to)))

    def _load(self, original: Any, module: nn.Module, state: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(state, dict):
            floating = {k: v for k, v in state.items() if isinstance(v, torch.Tensor) and v.is_floating_point()}
            self.loaded = {str(name): dtype_name(value.dtype) for name, value in floating.items()}
        return original(module, state, *args, **kwargs)


def _first(module: nn.Module) -> torch.dtype | None:
    """Return the dtype of a module's first floating tensor."""
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.is_floating_point():
            return tensor.dtype
    return None
