"""Operator rules: the readable table (operator -> class -> precision, reason, source) and its user extension."""

from __future__ import annotations

import fnmatch
import re
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from autoprec.errors import FileError, UnknownNameError
from autoprec.graph.report import GraphReport
from autoprec.support.files import read_document

RULES_SCHEMA = "autoprec.rules/1"
#: What a class may ask for.
PRECISIONS = ("tunable", "fp32", "follow", "keep")
#: What makes a name of the table a pattern; most are names, and need no expression compiled.
_GLOB = re.compile(r"[*?[]")
_BUILTIN = Path(__file__).with_name("rules.yaml")


@dataclass(frozen=True, slots=True)
class OperatorClass:
    """A class of operators: its precision by default, why, and who says so."""

    name: str
    precision: str
    reason: str
    source: str = ""


@dataclass(frozen=True)
class Rules:
    """Ordered operator globs and the classes they lead to; first match wins, a user's (``own``) before the rest."""

    classes: dict[str, OperatorClass]
    patterns: tuple[tuple[str, str], ...]
    own: tuple[tuple[str, str], ...] = ()
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
        bare = name[:-1] if name.endswith("_") and not name.endswith("__") else name
        for pattern, cls in (*self.own, *self.patterns):
            wanted_namespace, _, wanted = pattern.rpartition("::")
            if wanted_namespace and wanted_namespace != namespace:
                continue
            if wanted in (bare, name) or (
                _GLOB.search(wanted) and (fnmatch.fnmatchcase(bare, wanted) or fnmatch.fnmatchcase(name, wanted))
            ):
                return cls
        return ""

    def describe(self, cls: str) -> OperatorClass:
        """Return a class by name.

        Raises:
            UnknownNameError: with the nearest valid class.
        """
        try:
            return self.classes[cls]
        except KeyError:
            raise UnknownNameError("operator class", cls, self.classes) from None


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise FileError(f"{value!r} is not text", where=where, fix="write a string")
    return value


def _class(name: str, row: Any, where: str) -> OperatorClass:
    if not isinstance(row, dict) or set(row) - {"precision", "reason", "source"}:
        raise FileError("a class has the keys precision, reason and source", where=where, fix="correct the entry")
    precision = _text(row.get("precision", ""), f"{where}.precision")
    if precision not in PRECISIONS:
        raise UnknownNameError("precision", precision, PRECISIONS, where=where)
    reason = _text(row.get("reason", ""), f"{where}.reason")
    if not reason:
        raise FileError("a class needs a reason a person can read", where=where, fix="add reason: '...'")
    return OperatorClass(name, precision, reason, _text(row.get("source", ""), f"{where}.source"))


def _parse(document: dict[str, Any], where: str) -> tuple[dict[str, OperatorClass], list[tuple[str, str]]]:
    if document.get("schema") != RULES_SCHEMA:
        raise FileError(
            f"schema is not {RULES_SCHEMA}", where=where, fix=f"start the file with 'schema: {RULES_SCHEMA}'"
        )
    unknown = set(document) - {"schema", "classes", "operators"}
    if unknown:
        raise UnknownNameError("key", sorted(unknown)[0], ("schema", "classes", "operators"), where=where)
    rows = document.get("classes") or {}
    if not isinstance(rows, dict):
        raise FileError("classes is not a mapping", where=where, fix="write 'classes: {name: {precision, reason}}'")
    classes = {name: _class(name, row, f"{where}: classes.{name}") for name, row in rows.items()}
    patterns: list[tuple[str, str]] = []
    entries = document.get("operators") or []
    if not isinstance(entries, list):
        raise FileError("operators is not a list", where=where, fix="write 'operators: [{class: ..., ops: [...]}]'")
    for index, entry in enumerate(entries):
        here = f"{where}: operators[{index}]"
        if not isinstance(entry, dict) or set(entry) != {"class", "ops"} or not isinstance(entry["ops"], list):
            raise FileError("an entry has exactly the keys class and ops", where=here, fix="{class: norm, ops: [...]}")
        cls = _text(entry["class"], f"{here}.class")
        patterns += [(_text(op, f"{here}.ops"), cls) for op in entry["ops"]]
    return classes, patterns


@lru_cache(maxsize=1)
def _builtin() -> tuple[dict[str, OperatorClass], tuple[tuple[str, str], ...]]:
    classes, patterns = _parse(read_document(_BUILTIN), "built-in rules")
    return classes, tuple(patterns)


def load_rules(extension: Path | str | None = None) -> Rules:
    """Return the built-in rules, a user's file read before them.

    Args:
        extension: a YAML or JSON file of the same form; its classes replace built-in ones of the same name, its
            operator globs are tried first.

    Raises:
        FileError: the file cannot be read or is malformed.
        UnknownNameError: an entry names a class that exists in neither file, or an unknown precision or key.
    """
    classes, patterns = _builtin()
    own: tuple[tuple[str, str], ...] = ()
    if extension is not None:
        own_classes, own_patterns = _parse(read_document(extension), str(extension))
        classes, own = classes | own_classes, tuple(own_patterns)
    for _, cls in (*own, *patterns):
        if cls not in classes:
            raise UnknownNameError("operator class", cls, classes, where=str(extension or "built-in rules"))
    return Rules(classes, patterns, own)


def reclassify(report: GraphReport, rules: Rules) -> GraphReport:
    """Return a report that was classified by the built-in rules as a user's rules would have it.

    Operators that the user's file names change class, unless they are part of a recognised hand-written operator;
    classes that the file describes anew change precision and reason everywhere. FLOPs and layers stay.
    """
    named = Rules(rules.classes, (), rules.own)
    builtin, _ = _builtin()
    rows = []
    for operator in report.operators:
        cls = operator.cls if operator.pattern else named.class_of(operator.op) or operator.cls
        about = rules.describe(cls)
        if cls != operator.cls or about != builtin.get(cls):
            operator = replace(operator, cls=cls, precision=about.precision, reason=about.reason)
        rows.append(operator)
    return replace(report, operators=tuple(rows))
