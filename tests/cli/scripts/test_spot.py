"""``autoprec check --sensitivity``: a policy on the model itself."""

from pathlib import Path

import pytest

from autoprec.policy import load_policy, save_policy
from tests.cli.helpers import autoprec
from tests.tuning.transfer.test_proxy import policy

pytestmark = pytest.mark.usefixtures("warm")
TRAIN = """
import torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(2)), nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
x, y = torch.randn(256, 16), torch.randn(256, 4)
for step in range(20):
    rows = torch.arange(16) + 12 * step % 240
    nn.functional.mse_loss(model(x[rows]), y[rows]).backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_it_holds_or_a_corrected_policy_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(TRAIN)
    save_policy(policy(("?.0", "fp8_rowwise"), ("2", "keep")), "good.yaml")
    done = autoprec("check", "--policy", "good.yaml", "--sensitivity", "3", "--json", "train.py")
    spot = done.json()["sensitivity"]
    assert done.code == 0, done.err
    assert spot["rows"][0]["name"] == "whole policy"
    assert 0 < spot["rows"][0]["error"] < spot["limit"]
    bad = policy(("?.0", "mxfp8"), ("2", "keep"))
    rough = bad.model_copy(
        update={
            "recipes": {
                **bad.recipes,
                "mxfp8": bad.recipes["mxfp8"].model_copy(update={"format": "nvfp4", "operands": None}),
            }
        }
    )
    save_policy(rough.model_copy(update={"evidence": {"target": "b200"}}), "rough.yaml")
    monkeypatch.setattr("autoprec.cli.scripts.spot.LIMIT", 1e-3)
    done = autoprec("check", "--policy", "rough.yaml", "--sensitivity", "2", "train.py")
    assert done.code == 1
    assert "rough.checked.yaml" in done.err
    assert "nvfp4" not in {r.format for r in load_policy("rough.checked.yaml").recipes.values()}
