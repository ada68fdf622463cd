"""YAML as plain data: nothing but text, numbers, lists and mappings can come out, and little is spent on the rest.

PyYAML's safe loader runs no code, but it follows aliases (a text of 1 KiB can describe a billion values), and it builds
a node for every value before anything can be refused. So a text is read twice: its events are looked at first, where
aliases, tags, depth and the number of values are refused; what passes is loaded.
"""

from __future__ import annotations

from typing import Any

import yaml

#: Documents of ours nest less than ten deep; Python's own stack ends a parser near a thousand.
MAX_DEPTH = 32
#: Values in one document; the largest policy of a thousand layers has under 10,000.
MAX_VALUES = 100_000
#: No number that fits into 64 bits is written with more characters; longer ones take time that grows with the square.
MAX_NUMBER = 100

_CORE = "tag:yaml.org,2002:"
_PLAIN = frozenset(_CORE + name for name in ("null", "bool", "int", "float", "str", "timestamp", "seq", "map"))
#: Of libyaml, ten times faster, where PyYAML was built with it.
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def _refuse(problem: str, at: Any) -> yaml.YAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=at.start_mark)


def _check_events(text: str) -> None:
    """Refuse a text by its events, before anything is built.

    Raises:
        yaml.YAMLError: see :func:`parse_yaml`.
    """
    depth = values = documents = 0
    for event in yaml.parse(text, Loader=_Loader):
        if isinstance(event, yaml.AliasEvent):
            raise _refuse("YAML aliases are not accepted", event)
        if isinstance(event, yaml.DocumentStartEvent):
            documents += 1
            if documents > 1:
                raise _refuse("a second document follows", event)
        if isinstance(event, yaml.NodeEvent):
            values += 1
            if values > MAX_VALUES:
                raise _refuse(f"more than {MAX_VALUES} values", event)
            tag = getattr(event, "tag", None)
            if tag not in (None, "!") and tag not in _PLAIN:
                raise _refuse(f"tag '{tag}' is not plain data", event)
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            if depth > MAX_DEPTH + 1:
                raise _refuse(f"nested deeper than {MAX_DEPTH}", event)
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1


class _PlainLoader(_Loader):  # type: ignore[misc]
    """The safe loader without dates and merged keys, and with keys that are text and stand once."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[str, Any]:  # noqa: ARG002
        out: dict[str, Any] = {}
        if not isinstance(node, yaml.MappingNode):
            raise _refuse(f"tag '{node.tag}' is not plain data", node)
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                raise _refuse("a list or mapping cannot be a key", key_node)
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str):
                raise _refuse(f"key {key!r} is not text", key_node)
            if key in out:
                raise _refuse(f"key '{key}' appears twice", key_node)
            out[key] = self.construct_object(value_node, deep=True)
        return out

    def plain_scalar(self, node: Any) -> Any:
        name = node.tag.removeprefix(_CORE)
        if len(node.value) > MAX_NUMBER and name in ("int", "float"):
            raise _refuse("a number of more than 64 bits", node)
        try:
            return getattr(yaml.constructor.SafeConstructor, f"construct_yaml_{name}")(self, node)
        except (KeyError, IndexError, OverflowError, ValueError) as error:  # e.g. !!bool maybe
            raise _refuse(f"'{node.value}' is not a valid {name}", node) from error

    def refused(self, node: Any) -> Any:
        raise _refuse(f"tag '{node.tag}' is not plain data", node)


for _name in ("bool", "int", "float"):
    _PlainLoader.add_constructor(_CORE + _name, _PlainLoader.plain_scalar)
_PlainLoader.add_constructor(_CORE + "timestamp", yaml.constructor.SafeConstructor.construct_yaml_str)
_PlainLoader.add_constructor(None, _PlainLoader.refused)  # the key <<, for one


def parse_yaml(text: str) -> Any:
    """Return the plain value that a YAML text describes.

    Time and memory are bounded by the text's length; nothing in it can name code.

    Raises:
        yaml.YAMLError: malformed, more than one document, an alias, a tag that is not plain data, a key that is not
            text or appears twice, nested deeper than ``MAX_DEPTH``, or more than ``MAX_VALUES`` values.
    """
    if "\x00" in text:
        raise yaml.YAMLError("holds a NUL character")
    try:
        _check_events(text)
        return _PlainLoader(text).get_single_data()
    except UnicodeEncodeError as error:  # a lone surrogate, which no file can hold
        raise yaml.YAMLError(f"holds text that is not Unicode, at character {error.start}") from None
