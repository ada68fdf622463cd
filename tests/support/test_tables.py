"""A table as text, as HTML and as rich draws it; what others named is shown, never obeyed."""

from __future__ import annotations

import io

from rich.console import Console

from autoprec.support.tables import Shown, Table

TABLE = Table(("name", "ok", "why"), (("layer", "yes", ""), ("<b>\x1b[2J", "NO", "ran & fell")), "title", ("note",))


class Thing(Shown):
    def table(self) -> Table:
        return TABLE


def test_text_is_aligned() -> None:
    assert Table(("a", "b"), (("long name", "x"), ("y", "z"))).text() == "a          b\nlong name  x\ny          z"
    assert str(Thing()).startswith("title\nname")
    assert str(Thing()).endswith("\nnote")


def test_html_escapes_and_spells() -> None:
    page = Thing()._repr_html_()
    assert "&lt;b&gt;\\x1b[2J" in page
    assert "<b>NO</b>" in page
    assert "ran &amp; fell" in page
    assert page.count("<tr>") == 3


def test_rich_draws_it() -> None:
    console = Console(file=io.StringIO(), width=60)
    console.print(Thing())
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "ran & fell" in shown
    assert "\x1b[2J" not in shown
    assert shown.startswith("title")
