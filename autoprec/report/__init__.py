"""What a search found, for people: one self-contained HTML page, and Markdown.

Everything is drawn from a :class:`~autoprec.tuning.study.records.SearchResult` and its trial records; nothing here
needs torch, a network, or a plotting library.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from autoprec.support.lazy import names_on_use

if TYPE_CHECKING:
    from autoprec.report.html import write_html
    from autoprec.report.markdown import write_markdown

__all__ = ["write_html", "write_markdown"]

__getattr__ = names_on_use(
    __name__,
    {"write_html": "html", "write_markdown": "markdown"},
)
