"""Findings in text, as GitHub's annotations, and as SARIF."""

from __future__ import annotations

from autoprec.graph.census import Judged
from autoprec.reports.findings import TEXTS, counts, sarif, sound
from autoprec.tuning.lint.rules import RULES, Finding

FOUND = [
    Finding("rule-unmatched", "policy.yaml:4", (), {"what": "a.*", "near": ""}),
    Finding("router-low-precision", "model.py:7", ("blocks.0.gate",)),
    Finding("model-changed", "", (), {"then": "A", "now": "B"}),
]


def test_text_has_place_code_and_fix_and_what_was_found() -> None:
    text = TEXTS["text"](FOUND)
    assert text.startswith("policy.yaml:4: error: the rule 'a.*' matches no layer [rule-unmatched]\n    fix: ")
    assert text.endswith("2 errors, 1 note")
    assert TEXTS["text"]([]) == "nothing found"
    assert counts(FOUND) == {"error": 2, "warning": 0, "note": 1}


def test_what_is_sound_is_said_by_what_was_seen() -> None:
    judged = Judged(looked_at={"operators": 1234, "updates": 7})
    assert sound(judged) == (
        "the script's own precision is sound, as far as one step shows it; looked at: 1,234 operators, 7 updates"
    )
    assert sound(judged, FOUND[2:]).startswith("the script's own precision is sound")  # a note
    warned = [Finding("head-low-precision", data={"recipe": "x"})] * 2
    assert sound(judged, warned).startswith("no error, but 2 warnings, as far as one step shows it; looked at: ")
    unseen = Judged(looked_at={"operators": 3, "updates": 0})
    assert "as far as forward and backward show it (no update was seen)" in sound(unseen)


def test_github_annotates_lines_and_escapes_what_its_commands_reserve() -> None:
    lines = TEXTS["github"]([Finding("rule-unmatched", "a,b:c.yaml:4", (), {"what": "100%\n", "near": ""}), FOUND[2]])
    first, last = lines.splitlines()
    assert first.startswith("::error file=a%2Cb%3Ac.yaml,line=4,title=rule-unmatched::the rule '100%25%0A' matches")
    assert last.startswith("::notice title=model-changed::")


def test_sarif_has_what_its_schema_requires() -> None:
    """Required keys and values of sarif-schema-2.1.0.json for what is written."""
    log = sarif(FOUND)
    assert (log["version"], log["$schema"]) == ("2.1.0", "https://json.schemastore.org/sarif-2.1.0.json")
    (run,) = log["runs"]
    assert [rule["id"] for rule in run["tool"]["driver"]["rules"]] == list(RULES)
    for one, result in zip(FOUND, run["results"], strict=True):
        assert run["tool"]["driver"]["rules"][result["ruleIndex"]]["id"] == result["ruleId"] == one.code
        assert result["level"] in ("error", "warning", "note")
        assert result["message"]["text"]
        for place in result.get("locations", ()):
            assert place["physicalLocation"]["region"]["startLine"] >= 1
    assert "locations" not in run["results"][2]
