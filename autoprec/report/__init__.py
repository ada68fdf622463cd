"""What a search found, for people: one self-contained HTML page, and Markdown.

Everything is drawn from a :class:`~autoprec.tuning.study.records.SearchResult` and its trial records; nothing here
needs torch, a network, or a plotting library.
"""
