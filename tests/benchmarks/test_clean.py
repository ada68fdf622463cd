"""The benchmark over scripts that are to be clean: what it calls a fault of a command, and whose word a finding has."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from autoprec.tuning.lint.rules import RULES
from benchmarks.precision import clean
from benchmarks.scripts.scripts import manifest


def done(*findings: dict[str, Any], **more: Any) -> dict[str, Any]:
    plain = {"code": 0, "seconds": 1.0, "changed": [], "err": "", "answered": True, "unseen": [], "lifted": ""}
    return plain | {"findings": list(findings)} | more


def finding(code: str = "wide-part", line: int = 3, severity: str = "note") -> dict[str, Any]:
    return {"code": code, "severity": severity, "message": "m", "fix": "f", "file": "train.py", "line": line}


def record(**commands: dict[str, Any]) -> dict[str, Any]:
    return {"name": "a", "skipped": "", "commit": "c", **commands}


def test_a_finding_is_one_row_for_both_commands_and_has_the_word_of_who_looked_at_it() -> None:
    both = record(check=done(finding(), finding(line=5)), lint=done(finding()))
    said = [{"scripts": ["a"], "code": "wide-part", "place": "train.py:3", "right": True, "why": "it is meant"}]
    first, second = clean.rows_of(both, said)
    assert (first.by, first.right, first.why) == (("check", "lint"), True, "it is meant")
    assert (second.by, second.right) == (("check",), None)
    assert "findings that not every command says that has judged the step | 1 a (wide-part)" in clean.page([both], 120)


@pytest.mark.parametrize(
    ("one", "crashed", "said"),
    [
        (done(), False, "nothing found"),
        (done(finding(), finding(line=4)), False, "2 note wide-part"),
        (done(code="time", answered=False), False, "cut off"),
        (done(code=4, answered=False, err="Traceback\nautoprec: error: no step was seen"), False, "no step was seen"),
        (done(code=0, answered=False), True, "FAULT: exit 0: []"),
        (done(code=1, answered=False, err="this is a defect of AutoPrec"), True, "FAULT"),
        (done(code=4, answered=False, err="AutoPrec's own code failed inside the script's process"), True, "FAULT"),
        (done(unseen=["no update"]), False, "nothing found; not judged: no update"),
    ],
)
def test_what_a_command_said_is_told_from_how_it_ended(one: dict[str, Any], crashed: bool, said: str) -> None:
    assert clean.crashed(one) is crashed
    assert clean.told(record(check=one), "check").startswith(said)


def test_what_was_justified_names_scripts_and_codes_that_exist() -> None:
    known = {script.name for script in (*clean.ours(), *manifest())}
    for row in yaml.safe_load(clean.JUSTIFIED.read_text())["findings"]:
        assert set(row["scripts"]) <= known
        assert row["code"] in RULES
        assert isinstance(row["right"], bool)
        assert row["why"]


def test_an_answer_without_a_step_is_not_a_judgement() -> None:
    lint = done(unseen=["no step was recorded, so layers were not looked at: why"])
    assert not clean.judges(lint)
    assert not clean.judges({})
    assert clean.judges(done())
    assert "from other people's repositories | 0, 0 |" in clean.page([record(lint=lint)], 120)
