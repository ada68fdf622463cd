"""Versions are those that are installed; a commit is that of the folder, and says what is not in it."""

from __future__ import annotations

import subprocess
from importlib.metadata import version
from pathlib import Path

import autoprec
from autoprec.tracking.origin import commit_of, versions


def test_versions_are_those_that_run() -> None:
    found = versions()
    assert found["autoprec"] == autoprec.__version__
    assert found["torch"] == version("torch")
    assert "transformer-engine" not in found


def test_a_commit_and_what_is_not_in_it(tmp_path: Path) -> None:
    def git(*words: str) -> str:
        who = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
        return subprocess.run(["git", "-C", tmp_path, *who, *words], capture_output=True, text=True, check=True).stdout

    assert commit_of(str(tmp_path / "missing")) == {}
    git("init", "-q")
    assert commit_of(str(tmp_path)) == {}, "nothing was committed"
    script = tmp_path / "train.py"
    script.write_text("pass\n")
    git("add", "train.py")
    git("commit", "-qm", "one")
    assert commit_of(str(tmp_path)) == {"git_commit": git("rev-parse", "HEAD").strip(), "git_changes": "none"}
    script.write_text("print()\n")
    assert commit_of(str(tmp_path))["git_changes"] == "uncommitted"
