from __future__ import annotations

import json
from pathlib import Path

import pytest

from autoprec.trial.command import ScriptCommand
from autoprec.trial.driver.execute import command_from_json, command_to_json, main, request
from autoprec.trial.protocol import TrainSpec, TrialResult

pytestmark = pytest.mark.usefixtures("warm")

TRAIN = """
import torch
torch.manual_seed(0)
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(50):
    loss = model(torch.randn(16, 8)).square().mean()
    optimizer.zero_grad(); loss.backward(); optimizer.step()
"""


def test_a_command_survives_json(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    command = ScriptCommand.parse(("train.py", "--lr", "1"), cwd=tmp_path)
    assert command_from_json(json.loads(json.dumps(command_to_json(command)))) == command


@pytest.mark.parametrize("script", [TRAIN, "raise SystemExit('no data')"])
def test_request_in_result_out(tmp_path: Path, script: str) -> None:
    (tmp_path / "train.py").write_text(script)
    command = ScriptCommand.parse(("train.py",), cwd=tmp_path)
    (tmp_path / "request.json").write_text(json.dumps(request(command, TrainSpec(steps=5, warmup=1), launch="process")))
    assert main([str(tmp_path / "request.json"), str(tmp_path / "result.json")]) == 0
    result = TrialResult.from_json(json.loads((tmp_path / "result.json").read_text()))
    if script is TRAIN:
        assert result.ok, result
        assert len(result.losses) == 6
    else:
        assert result.status == "crashed"
        assert "no data" in result.reason


def test_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["one"]) == 2
    assert "usage" in capsys.readouterr().err
