"""What acts on a terminal or a page is spelled out; what people write is left alone."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from autoprec.support.text import markdown_text, visible


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\x1b]0;title\x07", "a\\x1b]0;title\\x07"),
        ("\x9b2J", "\\x9b2J"),
        ("a\u202etxt.exe", "a\\u202etxt.exe"),
        ("line\rover", "line\\x0dover"),
        ("\U000e0041", "\\U000e0041"),
        ("\x1b[31mred\x1b[0m", "red"),  # a script's own colours say nothing
        ("blocks.0.fc\tµ é 層 😀\nnext", "blocks.0.fc\tµ é 層 😀\nnext"),
    ],
)
def test_what_acts_is_spelled(text: str, shown: str) -> None:
    assert visible(text) == shown
    assert visible(shown) == shown


@given(st.text())
def test_nothing_that_acts_is_left(text: str) -> None:
    left = {char for char in visible(text) if unicodedata.category(char) in ("Cc", "Cs")}
    assert left <= {"\n", "\t"}
    assert not [c for c in visible(text) if unicodedata.bidirectional(c) in ("LRE", "RLE", "LRO", "RLO", "LRI", "RLI")]


HOSTILE = [
    "<script>alert(1)</script>", "<img src=x onerror=alert(1)>", "![x](http://evil/p.png)", "[x](javascript:alert(1))",
    "a | b", "`", "``` \n# head", "<http://evil>", "x`<img src=x>`", "`<img src=x>` <img src=y>", "\\<img src=x>",
    "\\\\<img src=x>", "\\`<img src=x>`", "`[x](y)`[x](y)`",
]  # fmt: skip


@pytest.mark.parametrize("text", HOSTILE)
@pytest.mark.parametrize("form", ["{}", "`{}`"])
def test_no_markup_comes_of_a_name(form: str, text: str) -> None:
    cell = markdown_text(form.format(text))
    for page in (f"- {cell}\n", f"{cell}\n", f"| name | b |\n|---|---|\n| {cell} | 1 |\n"):
        html = MarkdownIt("commonmark").enable("table").render(page)
        assert not [tag for tag in ("<script", "<img", "<a ", "<h1", "<pre") if tag in html], html
        assert html.count("<td") in (0, 2)
