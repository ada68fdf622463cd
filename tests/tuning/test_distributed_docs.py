"""The runner over submitit that docs/distributed.md shows, as it stands there."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

from autoprec.trial.command import ScriptCommand
from autoprec.trial.protocol import TrainSpec

PAGE = Path(__file__).resolve().parents[2] / "docs" / "distributed.md"
TRAIN = """
import torch
torch.manual_seed(0)
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(50):
    loss = model(torch.randn(16, 8)).square().mean()
    optimizer.zero_grad(); loss.backward(); optimizer.step()
"""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif(importlib.util.find_spec("submitit") is None, reason="needs submitit: pip install submitit")
def test_the_submitit_runner_runs_a_trial(tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    scope: dict[str, Any] = {}
    exec(compile(code, str(PAGE), "exec"), scope)
    (tmp_path / "train.py").write_text(TRAIN)
    command = ScriptCommand.parse(("train.py",), cwd=tmp_path)
    runner = scope["SubmititRunner"](command, tmp_path / "runs", 0, cluster="debug")
    assert runner.start().optimizers == ("SGD",)
    result = runner.run(TrainSpec(steps=4, warmup=1))
    assert result.ok, result
    assert len(result.losses) == 5
