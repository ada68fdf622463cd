"""AutoPrec: find the per-layer precision policy that trains fastest without changing the loss curve you can measure.

    policy = autoprec.load("policy.yaml")
    policy.apply(model)

Importing the package imports nothing heavy: each public name is loaded when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from autoprec._version import __version__

if TYPE_CHECKING:
    from autoprec.apply import Policy, load
    from autoprec.errors import AutoPrecError

__all__ = [
    "AutoPrecError",
    "Policy",
    "__version__",
    "load",
]

#: public name -> the module that defines it
_HOME = {
    "AutoPrecError": "autoprec.errors",
    "Policy": "autoprec.apply",
    "load": "autoprec.apply",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'autoprec' has no attribute '{name}'")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
