"""What a model returns, and is given: containers of tensors, whose dtypes are looked at and widened."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from autoprec.numerics.rounding import SIXTEEN_BIT

#: Objects that are values as containers are: a copy with wider tensors is as good. Others, such as the caches of keys
#: and values that a model returns, are handed on and written to.
_VALUES = (torch.distributions.Distribution, torch.distributions.Transform, SimpleNamespace)


def _parts(value: Any) -> dict[str, Any]:
    """Return what a dataclass, a distribution or a namespace holds, by name; nothing of any other object."""
    if isinstance(value, _VALUES):
        return vars(value)
    whole = dataclasses.is_dataclass(value) and not isinstance(value, (type, dict))
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)} if whole else {}


def widest(value: Any) -> torch.dtype | None:
    """Return the widest dtype of floating-point numbers in a nest of containers, or None."""
    if isinstance(value, Tensor):
        return value.dtype if value.is_floating_point() else None
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (tuple, list)) else ()
    found = [dtype for item in (items or _parts(value).values()) if (dtype := widest(item)) is not None]
    return max(found, key=lambda dtype: dtype.itemsize, default=None)


def holds_low(value: Any) -> bool:
    """Say whether a nest of containers holds a tensor of 16 bits."""
    if isinstance(value, Tensor):
        return value.dtype in SIXTEEN_BIT
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (tuple, list)) else ()
    return any(holds_low(item) for item in (items or _parts(value).values()))


def unwidened(value: Any) -> str:
    """Return the class of a returned object whose tensors of 16 bits :func:`widen` leaves alone, or nothing."""
    own = not isinstance(value, (Tensor, dict, tuple, list)) and not _parts(value)
    return type(value).__name__ if own and holds_low(list(getattr(value, "__dict__", {}).values())) else ""


def widened(value: Tensor) -> Tensor:
    """Return a tensor of 16 bits, of any shape, in float32; any other is returned as it is."""
    return value.float() if value.dtype in SIXTEEN_BIT else value


def each_tensor(value: Any, put: Callable[[Tensor], Tensor]) -> Any:
    """Return nested containers with other tensors in the place of theirs; other objects are returned as they are.

    Args:
        value: what a model returns.
        put: returns what takes the place of a tensor of any shape.
    """
    if isinstance(value, Tensor):
        return put(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(each_tensor(item, put) for item in value))
    if isinstance(value, (tuple, list)):
        return type(value)(each_tensor(item, put) for item in value)
    if isinstance(value, dict):
        for key, item in value.items():
            changed = each_tensor(item, put)
            if changed is not item:
                value[key] = changed
    if held := _parts(value):
        value = copy.copy(value)
        for name, item in held.items():
            object.__setattr__(value, name, each_tensor(item, put))  # a frozen one as well
    return value
