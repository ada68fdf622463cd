"""A step recorded for a command, and what is said where there is not one."""

from __future__ import annotations

from pathlib import Path

import pytest

from autoprec.cli.phases import Phases
from autoprec.cli.recording import payload_of, record_step, tunable
from autoprec.errors import NothingAcceptableError, ScriptError
from autoprec.graph.report import GraphReport
from autoprec.trial.protocol import TrialResult

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
    assert [layer.name for layer in tunable(report).tunable] == ["0", "2"]
    assert host.device == "cpu"
    told = capsys.readouterr().err
    assert "running train.py to its first training step" in told
    assert "recording one training step" in told
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


@pytest.mark.parametrize(
    ("result", "text"),
    [
        (TrialResult("too_short", "the script ended"), "a smaller --warmup"),
        (TrialResult("crashed", "boom", tail="its own last line"), "its own last line"),
        (TrialResult("ok"), "run the script by itself first"),
    ],
)
def test_a_step_that_failed_says_why(result: TrialResult, text: str) -> None:
    with pytest.raises(ScriptError) as error:
        payload_of(result, "train.py", "recorded")
    assert text in str(error.value)
    assert "could not be recorded" in str(error.value)


def test_nothing_to_tune_is_an_answer_with_its_own_exit_code() -> None:
    report = GraphReport.from_json(EMPTY)
    with pytest.raises(NothingAcceptableError) as error:
        tunable(report)
    assert error.value.exit_code == 3


EMPTY = {
    **{"model": {}, "operators": [], "layers": [], "groups": {}, "notes": [], "batch": {}, "memory": {}, "source": ""},
    "coverage": {"total_flops": 0, "tunable_flops_share": 0.0},
}
