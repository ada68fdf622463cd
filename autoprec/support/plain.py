"""Dataclasses from their JSON form, in which a number that is not finite is null."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import fields
from functools import cache
from typing import Any, TypeVar

T = TypeVar("T")
#: A JSON object: a policy, an audit, or what a dataclass looks like on its way between processes.
Document = dict[str, Any]


def or_null(values: Iterable[float]) -> list[float | None]:
    """Return numbers with None in place of those that are not finite."""
    return [value if math.isfinite(value) else None for value in values]


def shallow(value: Any) -> Document:
    """Return a dataclass as a dictionary that shares its values, which ``asdict`` copies one by one."""
    return {name: getattr(value, name) for name in _names(value.__class__)}


@cache
def _names(cls: Any) -> tuple[str, ...]:
    return tuple(field.name for field in fields(cls))


def rebuild(cls: type[T], document: Mapping[str, Any]) -> T:
    """Return a dataclass from plain data: a list is a tuple where the field is one, null in it NaN.

    Keys that are not fields, as of another version, are left out.
    """
    values = {}
    for field in fields(cls):  # type: ignore[arg-type]
        if field.name in document:
            value = document[field.name]
            is_tuple = str(field.type).startswith("tuple")
            values[field.name] = tuple(math.nan if v is None else v for v in value) if is_tuple else value
    return cls(**values)
