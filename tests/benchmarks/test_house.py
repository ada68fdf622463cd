"""What the house is measured with: lines of code, circles of imports."""

from __future__ import annotations

from benchmarks.house import code_lines, connected


def test_lines_of_code_are_without_docstrings_comments_and_blanks() -> None:
    head, comment = '"""Head.\n\nMore."""\n\nimport os  # why\n\n\n', "    # comment\n"
    text = f'{head}def f():\n    """Says."""\n{comment}    return """a\n\nb"""\n'
    assert code_lines(text) == 1 + 1 + 3


def test_a_string_that_is_not_a_docstring_is_code() -> None:
    assert code_lines('x = 1\n"""kept\nas text"""\n') == 3


def test_circles_are_found_whatever_their_length() -> None:
    assert connected({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": set()}) == [["b", "c"]]
    assert connected({"a": {"b"}, "b": {"c"}, "c": set()}) == []
