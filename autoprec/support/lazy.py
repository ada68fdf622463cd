"""Public names of a package that are imported when they are first used, so that importing the package stays cheap."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def names_on_use(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """Return a package's ``__getattr__`` (PEP 562): a name is imported from its module once, then kept.

    Args:
        package: the package's ``__name__``.
        homes: public name -> the module that defines it, relative to the package; ``module:Name`` where it is called
            something else there.
    """

    def find(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module, _, own = homes[name].partition(":")
        value = getattr(importlib.import_module(f"{package}.{module}"), own or name)
        setattr(sys.modules[package], name, value)
        return value

    return find
