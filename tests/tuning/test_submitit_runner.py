"""The runner over submitit that docs/distributed.md links runs a trial."""

from __future__ import annotations

import importlib.util
import runpy
from pathlib import Path

import pytest

from autoprec.trial.command import ScriptCommand
from autoprec.trial.protocol import TrainSpec
from tests.documents import ROOT
from tests.trial.driver.test_execute import TRAIN


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif(importlib.util.find_spec("submitit") is None, reason="needs submitit: pip install submitit")
def test_the_submitit_runner_runs_a_trial(tmp_path: Path) -> None:
    runner_of = runpy.run_path(str(ROOT / "examples" / "submitit_runner.py"))["SubmititRunner"]
    (tmp_path / "train.py").write_text(TRAIN)
    command = ScriptCommand.parse(("train.py",), cwd=tmp_path)
    runner = runner_of(command, tmp_path / "runs", 0, cluster="debug")
    assert runner.start().optimizers == ("SGD",)
    result = runner.run(TrainSpec(steps=4, warmup=1))
    assert result.ok, result
    assert len(result.losses) == 5
