"""Globs on layer names: what they mean, and one that nobody can have meant is refused."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Annotated

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

#: Characters of a glob: generated names reach thousands, and a pattern of a megabyte takes seconds to compile.
LONGEST_GLOB = 4000
#: Rules of a policy: a file of 1 MiB holds 19,443 of the shortest; no model has as many layers to tell apart.
MOST_RULES = 20_000


def _pieces(pattern: str) -> list[str]:
    """Return the regular expressions of the texts between the stars of a glob."""
    out, index = [""], 0
    while index < len(pattern):
        char = pattern[index]
        index += 1
        if char == "*":
            if out[-1] or len(out) == 1:  # two stars are one
                out.append("")
        elif char == "?":
            out[-1] += "."
        elif char == "[" and (end := pattern.find("]", index + 1)) > 0:  # a "]" that comes first is one to match
            body = pattern[index:end].replace("\\", "\\\\").replace("[", "\\[")
            out[-1] += "[" + ("^" + body[1:] if body.startswith("!") else body.replace("^", "\\^", 1)) + "]"
            index = end + 1
        else:
            out[-1] += re.escape(char)
    return out


#: Each glob of the largest policy is compiled once: a cache that is smaller by one is of no use at all.
@lru_cache(maxsize=MOST_RULES + 4096)
def _compiled(pattern: str, bounded: bool = True) -> re.Pattern[str]:
    """Return the regular expression of a glob; ``bounded`` forbids it to try a star twice.

    The first place where the text between two stars is found is as good as any later one, so each such part can be
    atomic: without that ``*a*a*a*a*a*b`` takes hours on a name of a hundred letters.
    """
    first, *rest = _pieces(pattern)
    if bounded and rest:
        middle = "".join(f"(?>.*?{piece})" for piece in rest[:-1])
        text = f"{first}{middle}.*{rest[-1]}"
    else:
        text = ".*".join([first, *rest])
    try:
        return re.compile(text, re.DOTALL)
    except re.error:  # e.g. an inverted range: such a bracket is taken literally, as fnmatch does
        return re.compile(re.escape(pattern), re.DOTALL)


def glob_matches(pattern: str, name: str) -> bool:
    """Say whether a glob matches a whole module name; ``*`` also crosses dots, and case counts."""
    if "*" in pattern or "[" in pattern or "?" in pattern:
        return _compiled(pattern).fullmatch(name) is not None
    return pattern == name


def glob_regex(pattern: str) -> str:
    """Return the regular expression whose ``fullmatch`` is :func:`glob_matches`, for files that others read."""
    return _compiled(pattern, bounded=False).pattern


def escape(name: str) -> str:
    """Return a glob that matches exactly this name."""
    return re.sub(r"([*?\[])", r"[\1]", name)


def _closed(pattern: str) -> str:
    """Refuse a bracket that no other closes in a file: it would match itself, which is hardly ever what was meant."""
    at = 0
    while (at := pattern.find("[", at)) >= 0:
        end = pattern.find("]", at + 2)
        if end < 0:
            shown = pattern if len(pattern) <= 80 else f"{pattern[:80]}..."
            fix = f"close the bracket with ']', or write '{escape('[')}' for one that is part of the name"
            what = "the bracket at character {at} of '{shown}' is not closed"
            raise PydanticCustomError("unclosed_bracket", what, {"at": at + 1, "shown": shown, "fix": fix})
        at = end + 1
    return pattern


#: A glob in a file; the empty one matches the model itself, where that is a layer (``model = nn.Linear(8, 1)``).
Glob = Annotated[str, Field(max_length=LONGEST_GLOB), AfterValidator(_closed)]
