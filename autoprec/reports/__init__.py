"""What a search found, for people: one self-contained HTML page.

Everything is drawn from a :class:`~autoprec.tuning.study.records.SearchResult` and its trial records; nothing here
needs torch, a network, or a plotting library.
"""

from autoprec.reports.html import write_html as write_html
