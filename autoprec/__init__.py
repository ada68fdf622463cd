"""AutoPrec: find the per-layer precision policy that trains fastest without changing the loss curve you can measure.

    result = autoprec.search("train.py")
    policy = autoprec.load(result.policy)
    policy.apply(model)

Importing the package imports nothing heavy: each public name is loaded when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from autoprec._version import __version__

if TYPE_CHECKING:
    from autoprec.api import search
    from autoprec.applying.guard import Guard
    from autoprec.applying.policy import Policy, load
    from autoprec.errors import AutoPrecError
    from autoprec.trial.session import Session, register

__all__ = [
    "AutoPrecError",
    "Guard",
    "Policy",
    "Session",
    "__version__",
    "load",
    "register",
    "search",
]

#: public name -> the module that defines it
_HOME = {
    "AutoPrecError": "autoprec.errors",
    "Guard": "autoprec.applying.guard",
    "Policy": "autoprec.applying.policy",
    "Session": "autoprec.trial.session",
    "load": "autoprec.applying.policy",
    "register": "autoprec.trial.session",
    "search": "autoprec.api",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'autoprec' has no attribute '{name}'")
    value = globals()[name] = getattr(importlib.import_module(_HOME[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
