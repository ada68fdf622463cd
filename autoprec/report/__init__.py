"""What a search found, for people: one self-contained HTML page.

Everything is drawn from a :class:`~autoprec.tuning.study.records.SearchResult` and its trial records; nothing here
needs torch, a network, or a plotting library.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from autoprec.support.lazy import names_on_use

if TYPE_CHECKING:
    from autoprec.report.html import write_html

__all__ = ["write_html"]

__getattr__ = names_on_use(__name__, {"write_html": "html"})
