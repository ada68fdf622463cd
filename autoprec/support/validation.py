"""Documents as frozen pydantic models: one base, and errors that a person can act on."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, ValidationError

from autoprec.errors import FileError, nearest

M = TypeVar("M", bound=BaseModel)


class Frozen(BaseModel):
    """Frozen data; an unknown key, an infinity or NaN is refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, populate_by_name=True)


def validated(model: type[M], document: Any, *, where: str, about: str, error: type[FileError] = FileError) -> M:
    """Return a model of plain data.

    Args:
        where: the file, for the message.
        about: the page of docs/ that describes the format.
        error: what is raised.

    Raises:
        FileError: an unknown key or a value that is not valid; the message names it and the nearest valid one.
    """
    try:
        return model.model_validate(document)
    except ValidationError as problem:
        what, fix = explain(problem, model)
        raise error(what, where=where, fix=fix or f"correct the value; see docs/{about}.md") from problem


def explain(error: ValidationError, model: type[BaseModel]) -> tuple[str, str]:
    """Turn a pydantic error into (what is wrong, how to fix it or nothing), with near misses for unknown keys."""
    lines, fixes = [], []
    for item in error.errors(include_url=False)[:6]:
        location = item["loc"]
        where = cut(_path(part for part in location if part != "[key]")) or "document"
        if item["type"] == "extra_forbidden":
            valid = _keys_at(model, location[:-1])
            close = nearest(str(location[-1]), valid)
            lines.append(f"{where}: unknown key '{cut(location[-1])}'")
            fixes.append(f"did you mean '{close[0]}'?" if close else f"valid keys: {', '.join(valid)}")
        elif item["type"] == "literal_error":
            expected = str(item.get("ctx", {}).get("expected", "")).replace(" or ", ", ")
            valid = [value.strip("' ") for value in expected.split(",")]
            close = nearest(str(item["input"]), valid)
            lines.append(f"{where}: '{cut(item['input'])}' is not one of {', '.join(valid)}")
            fixes.append(f"did you mean '{close[0]}'?" if close else f"use one of {', '.join(valid)}")
        else:
            message = cut(str(item["msg"]).removeprefix("Value error, "), 1000)
            lines.append(f"{where}: {message}" if location else message)
            fixes += [str(fix)] if (fix := item.get("ctx", {}).get("fix")) else []
    return "; ".join(lines), " ".join(dict.fromkeys(fixes))


def cut(value: Any, most: int = 120) -> str:
    """Return a value of a file fit for a message: a key may be a megabyte long."""
    text = str(value)
    return text if len(text) <= most else f"{text[:most]}..."


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in get_args(annotation) for model in _models_in(part)]


def _keys_at(model: type[BaseModel], location: Iterable[Any]) -> list[str]:
    """Return the valid keys of the object at a pydantic error location."""
    current: list[type[BaseModel]] = [model]
    for part in location:
        fields = [(name, info) for candidate in current for name, info in candidate.model_fields.items()]
        current = [
            m for name, info in fields if part in (name, info.alias) for m in _models_in(info.annotation)
        ] or current
    return sorted({info.alias or name for candidate in current for name, info in candidate.model_fields.items()})


def _path(location: Iterable[Any]) -> str:
    out = ""
    for part in location:
        out += f"[{part}]" if isinstance(part, int) else (f".{part}" if out else str(part))
    return out
