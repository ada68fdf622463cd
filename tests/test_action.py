"""The GitHub Action's steps, run as a shell runs them, the pre-commit hook, and the page of codes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from autoprec.cli import cli
from autoprec.tuning.lint.rules import RULES

ROOT = Path(__file__).resolve().parent.parent
ACTION = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "lint --format github policy.yaml -- train.py --width 768"),
        ({"POLICY": "", "STRICT": "true"}, "lint --format github --strict -- train.py --width 768"),
        (
            {"TARGET": "h100", "SCRIPT": "*.py; touch no"},
            "lint --format github --target h100 policy.yaml -- *.py; touch no",
        ),
    ],
)
def test_the_action_s_step_calls_lint_with_its_inputs(given: dict[str, str], words: str, tmp_path: Path) -> None:
    _, step = ACTION["runs"]["steps"]
    assert set(step["env"]) == {"POLICY", "SCRIPT", "TARGET", "STRICT"}
    called = tmp_path / "autoprec"
    called.write_text('#!/bin/sh\necho "$@"\n')
    called.chmod(0o755)
    plain = {"POLICY": "policy.yaml", "SCRIPT": "train.py --width 768", "TARGET": "", "STRICT": "false"}
    environment = os.environ | plain | given | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-e", "-c", step["run"]], env=environment, cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == words.split()
    assert not (tmp_path / "no").exists()


def test_the_action_s_step_finds_what_a_policy_misses(tmp_path: Path) -> None:
    _, step = ACTION["runs"]["steps"]
    recipe = "recipes: {bf16: {format: bf16}}\nlayers: [{match: 'h.*.c_fc', recipe: bf16}]\n"
    (tmp_path / "policy.yaml").write_text(f"schema: autoprec.policy/1\n{recipe}")
    given = {"POLICY": "policy.yaml", "SCRIPT": "gpt2.json", "TARGET": "h100", "STRICT": "false"}
    (tmp_path / "gpt2.json").write_text(
        '{"model_type": "gpt2", "n_embd": 768, "n_layer": 2, "n_head": 12, "vocab_size": 50257}'
    )
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-e", "-c", step["run"]],
        env=os.environ | given | {"PATH": path},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1, done.stderr
    assert done.stdout.startswith("::error file=policy.yaml,line=3,title=rule-unmatched::the rule 'h.*.c_fc' matches")


def test_the_hook_is_a_command_of_ours() -> None:
    (hook,) = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text(encoding="utf-8"))
    command, name = hook["entry"].split()
    assert (command, name in cli.list_commands(None)) == ("autoprec", True)  # type: ignore[arg-type]


def test_every_code_is_on_its_page() -> None:
    page = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    for code, rule in RULES.items():
        assert f"| `{code}` | {rule.severity} | {rule.means} |" in page, code
