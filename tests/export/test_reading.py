"""Keys that nobody asks for are known."""

from __future__ import annotations

from typing import Any

import pytest

from autoprec.export.reading import Watched, plain

DOCUMENT = {"a": 1, "b": {"c": 2, "d": {"e": 3}}, "f": [{"g": 4, "h": 5}], 7: "number"}


@pytest.mark.parametrize(
    ("ask", "unread"),
    [
        (lambda d: None, ["a", "b", "f", "7"]),
        (lambda d: [d["a"], d["7"]], ["b", "f"]),
        (lambda d: [list(d), len(d), "a" in d, d == DOCUMENT], ["a", "b", "f", "7"]),
        (lambda d: [d.get("a"), d["b"], d["f"], d["7"]], ["b.c", "b.d", "f[0].g", "f[0].h"]),
        (lambda d: [d["a"], d["b"]["c"], d["f"][0]["h"], d["7"]], ["b.d", "f[0].g"]),
        (lambda d: list(d.items()), ["b.c", "b.d", "f[0].g", "f[0].h"]),
        (lambda d: plain(d), []),
    ],
)
def test_what_nobody_asked_for_is_named(ask: Any, unread: list[str]) -> None:
    document = Watched(DOCUMENT)
    ask(document)
    assert document.unread() == unread


def test_it_reads_as_the_mapping_does() -> None:
    document = Watched({"a": 1, "b": {"c": [1, {"d": 2}]}})
    assert document == {"a": 1, "b": {"c": [1, {"d": 2}]}}
    assert {**document}["a"] == 1
    assert plain(document) == {"a": 1, "b": {"c": [1, {"d": 2}]}}
    assert type(plain(document)["b"]) is dict
    with pytest.raises(KeyError):
        document["x"]


def test_a_misspelt_key_has_the_nearest_that_was_asked_for() -> None:
    document = Watched({"section": {"fp8_amax_histroy_len": 16, "fp8_margin": 1}})
    document.respelled("section", lambda key: key.removeprefix("fp8_"))
    assert document["section"].get("amax_history_len", 8) == 8
    assert document["section"]["margin"] == 1
    assert document.unread() == ["section.fp8_amax_histroy_len (did you mean amax_history_len?)"]
