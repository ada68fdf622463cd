"""The commands and snippets that the documentation shows, so that tests can run them."""

import re
import runpy
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")),
    *sorted((ROOT / "docs").glob("*.md")),
]
#: Writes the text of docs/cli.md.
reference = runpy.run_path(str(ROOT / "docs" / "reference.py"))["reference"]


@dataclass(frozen=True)
class Snippet:
    """One fenced block: where it stands, its language, its text."""

    page: str
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def snippets(language: str) -> list[Snippet]:
    """Return every fenced block of a language, in order of pages."""
    out = []
    for path in PAGES:
        text = path.read_text(encoding="utf-8")
        for found in re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
            if found[1] == language:
                line = text[: found.start()].count("\n") + 1
                out.append(Snippet(str(path.relative_to(ROOT)), line, language, found[2]))
    return out


def commands() -> list[tuple[str, list[str]]]:
    """Return (where, words) of every command line in a shell block; comments are dropped."""
    out = []
    for snippet in snippets("sh"):
        for offset, line in enumerate(snippet.text.splitlines(), 1):
            for part in re.split(r"\s+&&\s+", line):
                words = shlex.split(part, comments=True)
                if words:
                    out.append((f"{snippet.page}:{snippet.line + offset}", words))
    return out
