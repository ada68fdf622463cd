from __future__ import annotations

from pathlib import Path

import pytest

from autoprec.errors import StudyError
from autoprec.trial.command import ScriptCommand
from autoprec.tuning.options import SearchOptions
from autoprec.tuning.study.naming import free_name, is_numbered


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ScriptCommand:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my train.py").write_text("")
    return ScriptCommand.parse(("my train.py", "--lr", "1"))


def taken(*names: str) -> None:
    for name in names:
        folder = Path("autoprec-runs") / name
        folder.mkdir(parents=True)
        (folder / "study.db").write_text("")


def name(command: ScriptCommand, **changes: object) -> str:
    return free_name(SearchOptions(command=("my train.py",), **changes), command)  # type: ignore[arg-type]


def test_a_name_is_a_safe_file_name_and_says_the_target(command: ScriptCommand) -> None:
    assert "/" not in name(command)
    assert " " not in name(command)
    assert name(command, target="h100").endswith("-h100")


def test_taken_names_are_numbered(command: ScriptCommand) -> None:
    first = name(command)
    taken(first)
    assert name(command) == f"{first}-2"
    taken(f"{first}-2")
    assert name(command) == f"{first}-3"
    assert is_numbered(f"{first}-3", "autoprec-runs")
    assert not is_numbered(first, "autoprec-runs")
    assert not is_numbered("gpt-2", "autoprec-runs")  # a script of that name


def test_resume_takes_the_latest(command: ScriptCommand) -> None:
    with pytest.raises(StudyError, match="no study"):
        name(command, resume=True)
    first = name(command)
    taken(first)
    assert name(command, resume=True) == first
