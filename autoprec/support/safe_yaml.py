"""YAML as plain data, built from the parser's events: nothing but text, numbers, lists and mappings can come out.

A loader that composes nodes and then constructs objects has to forbid what it must not do, tag by tag, and spends
1 KiB on every value before it can refuse anything. Here a value is made from an event or not at all; aliases, tags,
depth, and the number of values are refused at the event where they appear, before anything is built on them.
"""

from __future__ import annotations

import sys
from typing import Any

import yaml

MAX_DEPTH = 32
#: Values in one document; the largest policy of a thousand layers has under 10,000.
MAX_VALUES = 100_000
#: No number that fits into 64 bits is written with more characters; longer ones take time that grows with the square.
MAX_NUMBER = 100

_CORE = "tag:yaml.org,2002:"
_SCALARS = frozenset(_CORE + name for name in ("null", "bool", "int", "float", "str", "timestamp"))

if yaml.__with_libyaml__:  # ten times faster, and on every platform that has a wheel
    from yaml.cyaml import CParser as _Parser  # type: ignore[attr-defined]
else:  # pragma: no cover - the pure Python parser, where PyYAML was built without libyaml

    class _Parser(yaml.reader.Reader, yaml.scanner.Scanner, yaml.parser.Parser):  # type: ignore[no-redef]
        def __init__(self, stream: str) -> None:
            yaml.reader.Reader.__init__(self, stream)
            yaml.scanner.Scanner.__init__(self)
            yaml.parser.Parser.__init__(self)


def _refuse(problem: str, event: Any) -> yaml.YAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=event.start_mark)


class _Builder:
    """Turns the events of one document into one plain value."""

    def __init__(self, text: str) -> None:
        self._parser: Any = _Parser(text)
        self._names: Any = yaml.resolver.Resolver()
        self._numbers = yaml.constructor.SafeConstructor()
        self._count = 0

    def document(self) -> Any:
        """Return the value of the only document; None for an empty one."""
        self._next()  # the stream's start
        event = self._next()
        if isinstance(event, yaml.StreamEndEvent):
            return None
        value = self._value(self._next(), 0)
        self._next()  # the document's end
        event = self._next()
        if not isinstance(event, yaml.StreamEndEvent):
            raise _refuse("a second document follows", event)
        return value

    def _next(self) -> Any:
        return self._parser.get_event()

    def _value(self, event: Any, depth: int) -> Any:
        self._count += 1
        if self._count > MAX_VALUES:
            raise _refuse(f"more than {MAX_VALUES} values", event)
        if depth > MAX_DEPTH:
            raise _refuse(f"nested deeper than {MAX_DEPTH}", event)
        if isinstance(event, yaml.ScalarEvent):
            return self._scalar(event)
        if isinstance(event, yaml.AliasEvent):
            raise _refuse("YAML aliases are not accepted", event)
        if isinstance(event, yaml.SequenceStartEvent):
            self._check_tag(event, "seq")
            return self._sequence(depth)
        self._check_tag(event, "map")
        return self._mapping(depth)

    def _sequence(self, depth: int) -> list[Any]:
        out: list[Any] = []
        while not isinstance(event := self._next(), yaml.SequenceEndEvent):
            out.append(self._value(event, depth + 1))
        return out

    def _mapping(self, depth: int) -> dict[str, Any]:
        out: dict[str, Any] = {}
        while not isinstance(event := self._next(), yaml.MappingEndEvent):
            if isinstance(event, yaml.CollectionStartEvent):
                raise _refuse("a list or mapping cannot be a key", event)
            key = self._value(event, depth + 1)
            if not isinstance(key, str):
                raise _refuse(f"key {key!r} is not text", event)
            if key in out:
                raise _refuse(f"key '{key}' appears twice", event)
            out[key] = self._value(self._next(), depth + 1)
        return out

    def _check_tag(self, event: Any, kind: str) -> None:
        if event.tag not in (None, "!", _CORE + kind):
            raise _refuse(f"tag '{event.tag}' is not plain data", event)

    def _scalar(self, event: Any) -> Any:
        tag = event.tag
        if tag is None or tag == "!":
            tag = self._names.resolve(yaml.ScalarNode, event.value, event.implicit)
        if tag not in _SCALARS:
            raise _refuse(f"tag '{tag}' is not plain data", event)
        name = tag.removeprefix(_CORE)
        if name in ("str", "timestamp"):
            return event.value
        if name == "null":
            return None
        if len(event.value) > MAX_NUMBER:
            raise _refuse("a number of more than 64 bits", event)
        node = yaml.ScalarNode(tag, event.value, event.start_mark, event.end_mark)
        try:
            return getattr(self._numbers, f"construct_yaml_{name}")(node)
        except (KeyError, IndexError, OverflowError) as error:  # e.g. !!bool maybe
            raise _refuse(f"'{event.value}' is not a valid {name}", event) from error


def parse_yaml(text: str) -> Any:
    """Return the plain value that a YAML text describes.

    Time and memory are bounded by the text's length; nothing in it can name code.

    Raises:
        yaml.YAMLError: malformed, more than one document, an alias, a tag that is not plain data, a key that is not
            text or appears twice, nested deeper than ``MAX_DEPTH``, or more than ``MAX_VALUES`` values.
        ValueError: a number that is none.
    """
    # libyaml keeps its own stack of open brackets; Python's is bounded by the depth check, before it can overflow
    if "\x00" in text:
        raise yaml.YAMLError("holds a NUL character")
    try:
        return _Builder(text).document()
    except UnicodeEncodeError as error:  # a lone surrogate, which no file can hold
        raise yaml.YAMLError(f"holds text that is not Unicode, at character {error.start}") from None
    except RecursionError as error:  # pragma: no cover - a caller deep in its own recursion
        raise yaml.YAMLError(f"nested too deep for this call ({sys.getrecursionlimit()} frames)") from error
