"""`autoprec run`: the script to its own end, under a policy."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.trial.conftest import SCRIPTS, uniform

CODE = (
    "import json, sys; from autoprec.trial.command import ScriptCommand;"
    "from autoprec.trial.driver.script import run_script;"
    "policy, audit, *words = sys.argv[1:];"
    "sys.exit(run_script(ScriptCommand.parse(words), json.loads(policy), audit=audit or False))"
)


def run(policy: object, audit: str, *words: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-c", CODE, json.dumps(policy), audit, *words]
    return subprocess.run(argv, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[3])


@pytest.mark.slow
def test_empty_policy_is_bit_identical_and_a_wrong_one_stops(tmp_path: Path) -> None:
    script = str(SCRIPTS / "plain.py")
    plain = subprocess.run([sys.executable, script, "--steps", "5"], capture_output=True, text=True, check=True)
    empty = run({"schema": "autoprec.policy/1"}, "", script, "--steps", "5")
    assert empty.returncode == 0
    assert empty.stdout == plain.stdout
    assert len(re.findall("loss", empty.stdout)) == 5
    bf16 = run(uniform("bf16"), str(tmp_path / "audit.json"), script, "--steps", "5")
    assert bf16.returncode == 0
    assert bf16.stdout != plain.stdout
    assert json.loads((tmp_path / "audit.json").read_text())["ok"]
    assert "emulated" not in bf16.stderr
    eight = {**uniform("bf16"), "recipes": {"bf16": {"format": "fp8"}}}  # the same rule, another recipe behind its name
    lines = run(eight, "", script, "--steps", "2").stderr.splitlines()
    assert [line for line in lines if "emulated on this device" in line] == lines[:1]
    wrong = run(uniform("bf16", "no.such.layer"), "", script)
    assert wrong.returncode == 1
    assert "no.such.layer" in wrong.stderr
    assert wrong.stdout == ""
