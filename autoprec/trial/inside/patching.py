"""Functions that stand in for others, and what is done to modules after their import. Standard library only."""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Callable
from typing import Any

#: Module -> what is called with it.
Wanted = dict[str, list[Callable[[Any], None]]]


def wrapped(original: Callable[..., Any], wrapper: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function like ``original`` that calls ``wrapper`` with it as the first argument."""

    @functools.wraps(original)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        return wrapper(original, *args, **kwargs)

    return replacement


def after_import(wanted: Wanted) -> None:
    """Call functions with each module: now where it is loaded, else right after it has been executed."""
    for name in [name for name in wanted if name in sys.modules]:
        for action in wanted.pop(name):
            action(sys.modules[name])
    sys.meta_path.insert(0, _Finder(wanted))


class _Finder:
    """A meta-path finder. A spec may be looked for without an import following: only what was executed is forgotten."""

    def __init__(self, wanted: Wanted) -> None:
        self._wanted, self._busy = wanted, set[str]()

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:  # noqa: ARG002
        if name not in self._wanted or name in self._busy:
            return None
        self._busy.add(name)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._busy.discard(name)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            for action in self._wanted.pop(name, ()):
                action(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
