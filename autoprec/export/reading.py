"""A configuration that notes which of its keys a reader has asked for, so that the others can be named."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from difflib import get_close_matches
from typing import Any


def plain(value: Any) -> Any:
    """Return a value as it was written; all of its keys then count as read."""
    if isinstance(value, Watched):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list) else value


class Watched(Mapping[str, Any]):
    """A mapping, and those inside of it, whose keys count as read when their value is asked for.

    To iterate over the keys, to count them or to ask whether one is there reads none of them.

    Args:
        found: what was parsed.
        path: the keys that lead to it, as they are shown.
        spelled: from a key as it is written to the name under which it is asked for.
    """

    def __init__(self, found: Mapping[Any, Any], path: str = "", spelled: Callable[[str], str] = str) -> None:
        self._written = {spelled(str(key)): str(key) for key in found}
        self._values = {spelled(str(key)): _watched(value, f"{path}{key}") for key, value in found.items()}
        self._path = path
        self._read: set[str] = set()
        self._asked: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self._asked.add(str(key))
        value = self._values[key]
        self._read.add(key)
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, key: object) -> bool:
        self._asked.add(str(key))
        return key in self._values

    def __eq__(self, other: object) -> bool:
        theirs = other._values if isinstance(other, Watched) else other
        return self._values == theirs

    __hash__ = None  # type: ignore[assignment]

    def respelled(self, name: str, spelled: Callable[[str], str]) -> None:
        """Let the keys of one section be asked for by other names than they are written."""
        value = self._values.get(name)
        if isinstance(value, Watched):
            written = {value._written[key]: value._values[key] for key in value}
            self._values[name] = Watched(written, value._path, spelled)

    def unread(self) -> list[str]:
        """Return the keys that nobody has asked for, by their paths; with the nearest name that somebody did ask for.

        Of a section that nobody has asked for it is the section that is named.
        """
        out = []
        for key, value in self._values.items():
            if key not in self._read:
                close = get_close_matches(key, sorted(self._asked - {key}), n=1, cutoff=0.8)
                out.append(f"{self._path}{self._written[key]}" + (f" (did you mean {close[0]}?)" if close else ""))
            else:
                out += [name for one in _inside(value) for name in one.unread()]
        return out


def _watched(value: Any, path: str) -> Any:
    if isinstance(value, Watched):
        return value
    if isinstance(value, Mapping):
        return Watched(value, f"{path}.")
    return [_watched(item, f"{path}[{i}]") for i, item in enumerate(value)] if isinstance(value, list) else value


def _inside(value: Any) -> list[Watched]:
    if isinstance(value, Watched):
        return [value]
    return [one for item in value for one in _inside(item)] if isinstance(value, list) else []
