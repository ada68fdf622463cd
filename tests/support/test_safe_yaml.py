"""Plain YAML: the same values as the safe loader where both accept, and bounds where that one has none."""

import contextlib
import time
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from autoprec.support.safe_yaml import MAX_DEPTH, MAX_VALUES, parse_yaml

SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=10)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=15,
)


@given(VALUES, st.booleans())
def test_what_the_safe_dumper_writes_is_read_back(value: Any, flow: bool) -> None:
    text = yaml.safe_dump(value, default_flow_style=flow)
    if "&" not in text:  # an alias of an empty text, which is refused
        assert parse_yaml(text) == yaml.safe_load(text) == value


@pytest.mark.parametrize(
    "text",
    ["", "---\n", "a", "~", "1", "1_000", "0x1f", "0b101", "017", "1:30", "1.5e3", ".5", "yes", "off", "null", "! 12",
     "!!str 12", "!!int '12'", "!!float 1", "!!map {a: 1}", "!!seq [1]", "|\n a\n b\n", ">-\n a\n b\n", "'it''s'",
     '"\\u00e9"', "a: {b: [1, {c: d}]}", "? a\n: b", "a:\nb: 1", "%YAML 1.1\n---\na: 1\n...\n"],
)  # fmt: skip
def test_every_spelling_means_what_the_safe_loader_says(text: str) -> None:
    found = parse_yaml(text)
    assert found == yaml.safe_load(text)
    assert type(found) is type(yaml.safe_load(text))


def test_dates_stay_text() -> None:
    assert parse_yaml("2026-11-21 10:00:00") == "2026-11-21 10:00:00"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a: &x 1\nb: *x", "aliases"),
        ("&x [*x]", "aliases"),
        ("a: {<<: {b: 1}}", "not plain data"),
        ("!!python/name:os.system ''", "not plain data"),
        ("!<tag:yaml.org,2002:python/object/new:os.system> []", "not plain data"),
        ("!!set {a}", "not plain data"),
        ("!!map [1]", "not plain data"),
        ("!own 1", "not plain data"),
        ("? [a]\n: 1", "cannot be a key"),
        ("? {a: 1}\n: 1", "cannot be a key"),
        ("1: a", "is not text"),
        ("a: 1\na: 1", "appears twice"),
        ("a: 1\n---\nb: 1", "second document"),
        ("- " * (MAX_DEPTH + 2) + "a", "deeper"),
        ("a: [" + "a," * MAX_VALUES + "]", "more than"),
        ("9" * 200, "64 bits"),
        ("1" + ":1" * 200, "64 bits"),
        ("!!bool maybe", "is not a valid bool"),
        ("a: \x00", "NUL"),
        ("a: \ud800", "Unicode"),
        ("a: [1", "expected"),
    ],
)
def test_what_is_refused(text: str, says: str) -> None:
    with pytest.raises(yaml.YAMLError, match=says):
        parse_yaml(text)


@given(st.text(max_size=60))
def test_any_text_is_a_value_or_an_error(text: str) -> None:
    try:
        found = parse_yaml(text)
    except (yaml.YAMLError, ValueError):
        return
    assert found is None or isinstance(found, (str, int, float, bool, list, dict))


@pytest.mark.parametrize("unit", ["[", "- ", "{a: ", "? ", "!a ", "&a ", "1:", "#\n", "x\n  ", "a: 1\n", "[],"])
def test_a_megabyte_of_anything_is_over_soon(unit: str) -> None:
    text = "a: [" + unit * (2**20 // len(unit)) if unit == "[]," else unit * (2**20 // len(unit))
    began = time.process_time()
    with contextlib.suppress(yaml.YAMLError, ValueError):
        parse_yaml(text)
    assert time.process_time() - began < 10
