"""For the site: links from a page to a file of the repository (``../examples/...``) lead to the repository there."""

import re
from typing import Any

__all__ = ["on_page_markdown"]


def on_page_markdown(markdown: str, *, config: Any, **_: Any) -> str:
    """Return the page with its links that leave ``docs/`` made absolute; in a checkout they stay relative."""
    return re.sub(r"\]\(\.\./", f"]({config['repo_url']}/blob/main/", markdown)
