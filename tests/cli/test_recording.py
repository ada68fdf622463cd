"""A step recorded for a command."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from autoprec.cli.phases import Phases
from autoprec.cli.recording import record_step, running

pytestmark = pytest.mark.usefixtures("warm")

TRAIN = """
import torch
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_a_step_is_recorded_and_every_phase_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "train.py").write_text(TRAIN, encoding="utf-8")
    with Phases() as phases:
        report, host = record_step([str(tmp_path / "train.py")], phases)
    assert [layer.name for layer in report.tunable] == ["0", "2"]
    assert host.device == "cpu"
    told = capsys.readouterr().err
    assert "running train.py to its first training step" in told
    assert "recording one training step" in told
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


def test_all_that_a_command_keeps_lies_where_the_next_one_finds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a command that was killed left behind is removed by its name and its lock (trial/processes.py)."""
    (tmp_path / "train.py").write_text(TRAIN, encoding="utf-8")
    with tempfile.TemporaryDirectory() as folder, monkeypatch.context() as patch:
        patch.setattr(tempfile, "tempdir", folder)
        with Phases() as phases, running([str(tmp_path / "train.py")], phases) as (runner, _, _):
            (own,) = Path(folder).iterdir()
            assert own.name.startswith(f"autoprec-p{os.getpid()}-")
            assert runner.run_dir.parent == own
            assert list(runner.run_dir.iterdir())
        assert list(Path(folder).iterdir()) == []
