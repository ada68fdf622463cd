"""``autoprec sensitivity`` on a real script: the table, its JSON, and refusals before the script starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from autoprec.cli.sensitivity import sensitivity
from autoprec.errors import ScriptError, UnknownNameError
from autoprec.search.sensitivity import SensitivityTable

TRAIN = """
import torch
torch.manual_seed(0)
class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(32, 64), torch.nn.Linear(64, 32)
    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(x)))
model = torch.nn.Sequential(Block(), Block(), torch.nn.Linear(32, 16))
optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
for step in range(12):
    loss = torch.nn.functional.cross_entropy(model(torch.randn(64, 32)), torch.randint(16, (64,)))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sensitivity") / "train.py"
    path.write_text(TRAIN)
    return path


def test_four_bits_cost_more_than_eight_and_eight_more_than_sixteen(script: Path) -> None:
    result = CliRunner().invoke(sensitivity, ["--space", "blackwell-nvfp4", "--warmup", "3", "--json", str(script)])
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    table = SensitivityTable.from_json(document)
    errors: dict[str, dict[str, float]] = {}
    for row in document["rows"]:
        errors.setdefault(row["group"], {})[row["choice"]] = row["gradient_error"]
    assert set(errors) == {"0.up", "0.down", "1.up", "1.down", "2"}
    for group, row in errors.items():
        assert 0 < row["bf16"] < row["mxfp8"] < row["nvfp4"], group
        assert row["bf16"] < 0.02
    assert table.noise is not None
    assert 0.1 < table.noise < 20
    assert table.misfit.count == 4
    assert 0.6 < table.misfit.ratio < 1.7


def test_the_table_for_people(script: Path) -> None:
    result = CliRunner().invoke(sensitivity, ["--space", "tiny", "--warmup", "1", str(script)])
    assert result.exit_code == 0, result.output
    assert "1.down" in result.stdout
    assert "mini-batch gradient noise" in result.stdout
    assert "squares of errors add" in result.stdout


def test_an_unknown_space_or_target_is_refused_before_the_script_starts(tmp_path: Path) -> None:
    missing = str(tmp_path / "never_started.py")
    for option, name in (("--space", "hoper-fp8"), ("--target", "h1000")):
        result = CliRunner().invoke(sensitivity, [option, name, missing])
        assert isinstance(result.exception, UnknownNameError)


def test_a_script_that_fails_is_its_own_fault(tmp_path: Path) -> None:
    path = tmp_path / "broken.py"
    path.write_text("raise RuntimeError('no data here')\n")
    result = CliRunner().invoke(sensitivity, [str(path)])
    assert isinstance(result.exception, ScriptError)
    assert "no data here" in str(result.exception)
