"""What the runners of one command share."""

from __future__ import annotations

from pathlib import Path

from autoprec.trial.command import ScriptCommand
from autoprec.trial.family import Family


def test_one_family_per_command_until_the_last_leaves(tmp_path: Path) -> None:
    command = ScriptCommand("script", "train.py", (), tmp_path)
    first, second = Family.join(command), Family.join(ScriptCommand("script", "train.py", (), tmp_path))
    assert first is second
    assert first.new_mark() != first.new_mark()
    assert first.new_mark().startswith(first.mark)
    assert not first.ready
    assert first.fork({}, {}, "m", None) is None  # nobody has offered a copy
    folder = Path(first.address).parent
    first.leave()
    assert folder.exists()
    second.leave()
    assert not folder.exists()
    third = Family.join(command)
    assert third is not first
    third.leave()
