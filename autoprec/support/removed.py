"""Keyword arguments that a later version no longer takes: a call that still passes one is refused by its name."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

from autoprec.errors import UsageError

P = ParamSpec("P")
R = TypeVar("R")

#: Why ``follow=`` and ``run --follow`` are gone, and what to do instead.
FOLLOW = "phases that change during the run (`phases:` in the policy) and autoprec.Guard remain; see docs/long_run.md"


def no_longer_takes(**removed: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a function that took keyword arguments once: ``name=what to do instead``.

    None, the default that they had, is accepted. The decorated signature does not show them, so that type checkers
    refuse them.

    Raises:
        UsageError: (the decorated function) one of them is passed; the message names it and what to do.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            for name in removed.keys() & kwargs.keys():
                if kwargs.pop(name) is not None:
                    raise UsageError(f"the argument '{name}' was removed", fix=removed[name])
            return function(*args, **kwargs)

        return checked

    return decorate
