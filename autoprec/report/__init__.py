"""What a search found, for people: a terminal table, one self-contained HTML page, and Markdown.

Everything is drawn from a :class:`~autoprec.tuning.study.records.SearchResult` and its trial records; nothing here
needs torch, a network, or a plotting library.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autoprec.report.html import write_charts, write_html
    from autoprec.report.markdown import write_markdown
    from autoprec.report.terminal import terminal_table

__all__ = ["terminal_table", "write_charts", "write_html", "write_markdown"]

_MODULES = {"terminal_table": "terminal", "write_charts": "html", "write_html": "html", "write_markdown": "markdown"}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        import importlib

        return getattr(importlib.import_module(f"autoprec.report.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
