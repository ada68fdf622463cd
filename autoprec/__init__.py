"""AutoPrec: find the per-layer precision policy that trains fastest without changing the loss curve you can measure.

    result = autoprec.search("train.py")
    policy = autoprec.load(result.policy)
    policy.apply(model)

Importing the package imports nothing heavy: each public name is loaded when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from autoprec._version import __version__
from autoprec.support.lazy import names_on_use

if TYPE_CHECKING:
    from autoprec.api import search
    from autoprec.applying.guard import Guard
    from autoprec.applying.policy import TorchPolicy as Policy
    from autoprec.applying.policy import load
    from autoprec.errors import AutoPrecError
    from autoprec.trial.session import Session, register, report

__all__ = [
    "AutoPrecError",
    "Guard",
    "Policy",
    "Session",
    "__version__",
    "load",
    "register",
    "report",
    "search",
]

__getattr__ = names_on_use(
    __name__,
    {
        "AutoPrecError": "errors",
        "Guard": "applying.guard",
        "Policy": "applying.policy:TorchPolicy",
        "Session": "trial.session",
        "load": "applying.policy",
        "register": "trial.session",
        "report": "trial.session",
        "search": "api",
    },
)


def __dir__() -> list[str]:
    return sorted(__all__)
