"""AutoPrec: find the per-layer precision policy that trains fastest without changing the loss curve you can measure.

    result = autoprec.search("train.py")
    policy = autoprec.load(result.policy)
    policy.apply(model)

Importing the package imports nothing heavy: each public name is loaded when it is first used.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from autoprec._version import __version__

if TYPE_CHECKING:
    from autoprec.api import search
    from autoprec.apply import Policy, load
    from autoprec.errors import AutoPrecError
    from autoprec.guard import Guard
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
    "Guard": "autoprec.guard",
    "Policy": "autoprec.apply",
    "Session": "autoprec.trial.session",
    "load": "autoprec.apply",
    "register": "autoprec.trial.session",
    "search": "autoprec.search",
}


class _CallableRoom(ModuleType):
    """``autoprec.search`` is a function to its users and a package to the code: the package, made callable."""

    def __call__(self, script: Any, **options: Any) -> Any:
        from autoprec.api import search

        return search(script, **options)


class _Package(ModuleType):
    """Makes ``autoprec.search`` callable whoever imports it first."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "search" and type(value) is ModuleType:
            value.__class__ = _CallableRoom
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'autoprec' has no attribute '{name}'")
    home = importlib.import_module(_HOME[name])
    value = home if _HOME[name] == f"autoprec.{name}" else getattr(home, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
