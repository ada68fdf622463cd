"""Functions that stand in for others, and what is done to modules after their import. Standard library only."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from autoprec.support.living import uncollected

#: Module -> what is called with it.
Wanted = dict[str, list[Callable[[Any], None]]]


def wrapped(original: Callable[..., Any], wrapper: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function like ``original`` that calls ``wrapper`` with it as the first argument."""

    @functools.wraps(original)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        return wrapper(original, *args, **kwargs)

    return replacement


def after_import(wanted: Wanted) -> None:
    """Call functions with each module: now where it is loaded, and right after each time it is executed."""
    for name in [name for name in wanted if name in sys.modules]:
        for action in wanted[name]:
            action(sys.modules[name])
    sys.meta_path.insert(0, _Finder(wanted))


class _Finder:
    """A meta-path finder: what others find calls the actions when it is executed, not when it is looked for."""

    def __init__(self, wanted: Wanted) -> None:
        self._wanted = wanted

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name not in self._wanted:
            return None
        behind = sys.meta_path[sys.meta_path.index(self) + 1 :]
        spec = next(filter(None, (finder.find_spec(name, path, target) for finder in behind)), None)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            with uncollected():  # what a large library makes stays
                execute(module)
            for action in self._wanted[name]:
                action(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
