"""Operator rules: the readable table (operator -> class -> precision, reason, source)."""

from __future__ import annotations

import fnmatch
import re
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from autoprec.graph.trace import bare_name
from autoprec.support.files import read_document

#: What makes a name of the table a pattern; most are names, and need no expression compiled.
_GLOB = re.compile(r"[*?[]")
_BUILTIN = Path(__file__).with_name("rules.yaml")


@dataclass(frozen=True, slots=True)
class OperatorClass:
    """A class of operators: its precision by default, why, who says so, and which entry of a policy decides."""

    name: str
    precision: str
    reason: str
    source: str
    choice: str


@dataclass(frozen=True)
class Rules:
    """Ordered operator globs and the classes they lead to; first match wins."""

    classes: dict[str, OperatorClass]
    patterns: tuple[tuple[str, str], ...]
    _found: dict[str, str] = field(default_factory=dict, repr=False, compare=False)

    def class_of(self, operator: str) -> str | None:
        """Return the class of an operator such as ``aten::addmm_``; None when no rule names it."""
        found = self._found.get(operator)
        if found is None:
            found = self._search(operator)
            self._found[operator] = found
        return found or None

    def _search(self, operator: str) -> str:
        namespace, _, name = operator.rpartition("::")
        bare = bare_name(operator)
        for pattern, cls in self.patterns:
            wanted_namespace, _, wanted = pattern.rpartition("::")
            if wanted_namespace and wanted_namespace != namespace:
                continue
            if wanted in (bare, name) or (
                _GLOB.search(wanted) and (fnmatch.fnmatchcase(bare, wanted) or fnmatch.fnmatchcase(name, wanted))
            ):
                return cls
        return ""


@lru_cache(maxsize=1)
def builtin_rules() -> Rules:
    """Return the table of ``rules.yaml``."""
    document = read_document(_BUILTIN)
    classes = {name: OperatorClass(name, **row) for name, row in document["classes"].items()}
    return Rules(classes, tuple((op, entry["class"]) for entry in document["operators"] for op in entry["ops"]))
