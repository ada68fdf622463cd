"""Findings of ``autoprec lint`` for people, for programs, for GitHub, and as SARIF."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from autoprec._version import __version__
from autoprec.graph.census import Judged
from autoprec.support.units import counted
from autoprec.tuning.lint.rules import RULES, SEVERITIES, Finding

#: Our severities in GitHub's words, which are SARIF's but for ``notice``.
_GITHUB = {"error": "error", "warning": "warning", "note": "notice"}


def counts(findings: Sequence[Finding]) -> dict[str, int]:
    """Return how many findings there are of each severity."""
    return {severity: sum(one.severity == severity for one in findings) for severity in SEVERITIES}


def sound(judged: Judged, findings: Sequence[Finding] = ()) -> str:
    """Return what was looked at where no error was found, and whether that makes the script's precision sound.

    Args:
        judged: what one step showed.
        findings: what was found in it, no error among them.
    """
    looked = ", ".join(f"{count:,} {what}" for what, count in judged.looked_at.items())
    warnings = counts(findings)["warning"]
    said = f"no error, but {counted(warnings, 'warning')}" if warnings else "the script's own precision is sound"
    seen = (
        "one step shows it"
        if judged.looked_at.get("updates", 1)
        else "forward and backward show it (no update was seen)"
    )
    return f"{said}, as far as {seen}; looked at: {looked}"


def _text(findings: Sequence[Finding]) -> str:
    lines = []
    for one in findings:
        place = f"{one.place}: " if one.place else ""
        also = f"    see also: {', '.join(one.seen.also)}" if one.seen is not None and one.seen.also else ""
        lines += [f"{place}{one.severity}: {one.message} [{one.code}]", f"    fix: {one.fix}", *filter(None, [also])]
    found = [counted(count, severity) for severity, count in counts(findings).items() if count]
    return "\n".join([*lines, ", ".join(found) or "nothing found"])


def _escaped(text: str, more: str = "") -> str:
    """Return text as GitHub's workflow commands take it."""
    for char in "%\r\n" + more:
        text = text.replace(char, f"%{ord(char):02X}")
    return text


def _github(findings: Sequence[Finding]) -> str:
    """One workflow command a finding, which annotates the line in the pull request."""
    lines = []
    for one in findings:
        row = one.to_json()
        where = {"file": row["file"], "line": str(row["line"])} if row["line"] else {"file": row["file"]}
        given = ",".join(f"{key}={_escaped(value, ':,')}" for key, value in where.items() if value)
        title = f"{given},title={one.code}" if given else f"title={one.code}"
        lines.append(f"::{_GITHUB[one.severity]} {title}::{_escaped(f'{one.message}. Fix: {one.fix}')}")
    return "\n".join(lines)


def sarif(findings: Sequence[Finding]) -> dict[str, Any]:
    """Return findings as a SARIF 2.1.0 log with one run (OASIS, Static Analysis Results Interchange Format)."""
    rules = [
        {
            "id": code,
            "shortDescription": {"text": rule.means},
            "help": {"text": f"Example: {rule.example}"},
            "defaultConfiguration": {"level": rule.severity},
        }
        for code, rule in RULES.items()
    ]
    results = []
    for one in findings:
        row = one.to_json()
        result = {
            "ruleId": one.code,
            "ruleIndex": list(RULES).index(one.code),
            "level": one.severity,
            "message": {"text": f"{one.message}. Fix: {one.fix}"},
            "partialFingerprints": {"autoprec/1": one.key},
        }
        if row["file"]:
            location: dict[str, Any] = {"artifactLocation": {"uri": row["file"]}}
            if row["line"]:
                location["region"] = {"startLine": row["line"]}
            result["locations"] = [{"physicalLocation": location}]
        results.append(result)
    driver = {"name": "AutoPrec", "version": __version__, "rules": rules}
    return {
        "$schema": "https://json.schemastore.org/sarif-2.1.0.json",
        "version": "2.1.0",
        "runs": [{"tool": {"driver": driver}, "results": results}],
    }


#: Formats that are lines of text.
TEXTS: dict[str, Callable[[Sequence[Finding]], str]] = {"text": _text, "github": _github}
