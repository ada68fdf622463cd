"""Text of others on a terminal or a page: shown, never obeyed.

A policy, a study or a script may hold any text. Escape sequences would move the cursor, change the window's title or
paste commands; characters that turn the direction of writing would show another name than the one that is there.
"""

from __future__ import annotations

import re

#: Colours and weights, which a training script's own output is full of: they say nothing, and are left out.
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
#: C0 but line feed and tab, DEL, C1, lone surrogates, marks and overrides of direction, separators of lines.
_ACTING = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u2069\ufeff\ufff9-\ufffb\ud800-\udfff\U000e0000-\U000e007f]"
)


def _spelled(found: re.Match[str]) -> str:
    code = ord(found[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def visible(text: str) -> str:
    """Return text in which every character that acts on a terminal or a page is spelled (``\\x1b``, ``\\u202e``)."""
    return _ACTING.sub(_spelled, _COLOUR.sub("", text))


#: What would open a tag, a link, an image, a span of code or a column (written as an entity: a
#: backslash would be undone by one before it).
_MARKUP = re.compile(r"[<\[\]`]|(?<=\\\\)\|")


def markdown_text(text: str) -> str:
    """Return text for a line or a cell of Markdown: no tag, link, image or column comes of it.

    What stands between backticks already, as code, stays so.
    """
    line = " ".join(visible(text).split("\n"))
    if len(line) > 2 and line[0] == line[-1] == "`":
        return "`" + line[1:-1].replace("`", "'").replace("|", "/") + "`"
    return _MARKUP.sub(lambda found: f"&#{ord(found[0])};", re.sub(r"(?<!\\)\|", r"\\|", line))
