"""What the house is measured with: lines of code, circles of imports, figures without a reason."""

from __future__ import annotations

import pytest

from benchmarks.house import code_lines, connected, unexplained


def test_lines_of_code_are_without_docstrings_comments_and_blanks() -> None:
    head, comment = '"""Head.\n\nMore."""\n\nimport os  # why\n\n\n', "    # comment\n"
    text = f'{head}def f():\n    """Says."""\n{comment}    return """a\n\nb"""\n'
    assert code_lines(text) == 1 + 1 + 3


def test_a_string_that_is_not_a_docstring_is_code() -> None:
    assert code_lines('x = 1\n"""kept\nas text"""\n') == 3


def test_circles_are_found_whatever_their_length() -> None:
    assert connected({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": set()}) == [["b", "c"]]
    assert connected({"a": {"b"}, "b": {"c"}, "c": set()}) == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("PATIENCE_S = 60.0\n", ["1: PATIENCE_S"]),
        ("_MOST, _LEAST = 8, 2\n", ["1: _MOST, _LEAST"]),
        ("SIZES: dict[str, float] = {'bf16': 2.0}\n", ["1: SIZES"]),
        ("#: Seconds.\nPATIENCE_S = 60.0\nMOST = 5\n", ["3: MOST"]),  # a comment is of one assignment
        ("#: Seconds.\nPATIENCE_S = 60.0\n", []),
        ("MOST = 5  # as many as fit\n", []),
        ("TABLE = {\n    'a': 2,  # of a\n}\n", []),
        ("NAMES = ('norm', 'softmax')\nFIRST, LAST = NAMES[0], NAMES[5]\nON, OFF = 1, 0\n", []),
        ("local = 60.0\nclass A:\n    MOST = 5\n", []),  # not a module's constant
    ],
)
def test_a_figure_says_where_it_is_from(text: str, expected: list[str]) -> None:
    assert unexplained(text) == expected
