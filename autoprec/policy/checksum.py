"""The first line of a policy file that AutoPrec wrote with evidence: what tells a damaged file from a chosen one.

A policy cut off in the middle is often a smaller valid policy, and one flipped bit is often another valid recipe; both
would train quietly with the evidence of a policy they are not. The line is a comment, so that the schema knows
nothing of it, and it comes first, so that a file cut anywhere has lost its contents before it has lost the line. It is
over what the file says, not how: comments and layout may change, values may not.
"""

from __future__ import annotations

import re
from typing import Any

from autoprec.errors import PolicyError
from autoprec.support.files import checksum

_LINE = re.compile(r"# checksum sha256:([0-9a-f]{16}) \(after an edit by hand, delete this line\)\s*")
#: A comment that holds two of these was a checksum line, whatever happened to the rest of it.
_TRACES = ("checksum", "sha256:", "edit by hand", "delete this line")


def checksum_line(document: dict[str, Any]) -> str:
    """Return the line to write above the YAML text of a plain-data document (as that text is read back)."""
    return f"# checksum sha256:{checksum(document)} (after an edit by hand, delete this line)\n"


def _lines(text: str) -> list[str]:
    """Return the checksum lines, whole or damaged, among the comments above the first key."""
    out = []
    for line in text.lstrip("\ufeff").split("\n"):
        if line.strip() and not line.startswith("#"):
            break
        if sum(trace in line for trace in _TRACES) >= 2:
            out.append(line)
    return out


def verify_checksum(text: str, document: dict[str, Any], *, where: str) -> None:
    """Refuse a document whose text begins with a checksum line that is not its own; a text without one passes.

    Args:
        text: of the whole file.
        document: what was parsed from it.
        where: the file, for the message.

    Raises:
        PolicyError: the contents, or the line itself, were changed after AutoPrec wrote the file.
    """
    for line in _lines(text):
        found = _LINE.fullmatch(line)
        if found is None or found.group(1) != checksum(document):
            raise PolicyError(
                "the file was changed or damaged after AutoPrec wrote it (its checksum does not match), so its "
                "evidence no longer describes it",
                where=where,
                fix="get the original again; if it was edited on purpose, delete its first line",
            )
