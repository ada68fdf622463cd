"""``autoprec inspect --sensitivity``: the gradient error of every group under every recipe, of a real script."""

from pathlib import Path

import pytest

from tests.cli.helpers import autoprec

pytestmark = pytest.mark.usefixtures("warm", "_one_batch")

SCRIPT = """\
import torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(20):
    x = torch.randn(32, 32)
    loss = (model(x) - x.roll(1, 1)).square().mean()
    optimizer.zero_grad(); loss.backward(); optimizer.step()
"""


@pytest.fixture
def _one_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures of several batches are averaged in tests/tuning/decide/test_scan.py."""
    monkeypatch.setattr("autoprec.tuning.decide.scan._MOST_BATCHES", 1)


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT, encoding="utf-8")
    return path


@pytest.mark.slow
def test_eight_bits_cost_more_than_sixteen_everywhere(script: Path, tmp_path: Path) -> None:
    """On a user's own target, which is asked about its own recipes."""
    card, space = tmp_path / "mycard.yaml", tmp_path / "space.yaml"
    card.write_text(
        "schema: autoprec.targets/1\n"
        "targets:\n"
        "  mycard: {title: My card, vendor: nvidia, architecture: hopper, capability: '9.0', units: 100,\n"
        "    memory: 40, bandwidth: 1500, peaks: {fp32: 30, bf16: 400, fp8: 800}, links: {}, source: x, date: x}\n"
    )
    space.write_text(
        "schema: autoprec.space/1\nname: few\nbaseline: bf16\n"
        "choices: [{match: '*', choices: [bf16, fp8_rowwise, fp8_rowwise/wgrad=bf16]}]\n"
    )
    found = autoprec("inspect", "--sensitivity", "--target", card, "--space", space, "--json", script)
    assert found.code == 0, found.err
    document = found.json()
    assert document["noise"] > 0
    errors = {(row["group"], row["choice"]): row["gradient_error"] for row in document["rows"]}
    groups = {group for group, _ in errors}
    assert len(groups) == 2
    for group in groups:
        assert 0 < errors[group, "bf16"] < errors[group, "fp8_rowwise"] < 0.5
        assert errors[group, "fp8_rowwise/wgrad=bf16"] <= errors[group, "fp8_rowwise"]


@pytest.mark.slow
def test_a_layer_whose_weights_have_no_gradient_yet_is_named(script: Path) -> None:
    zeros = "nn.init.zeros_(model[2].weight)\noptimizer = torch.optim.SGD(model.parameters(), lr=1e-9)"
    script.write_text(
        SCRIPT.replace("optimizer = torch.optim.SGD(model.parameters(), lr=0.01)", zeros), encoding="utf-8"
    )
    found = autoprec("inspect", "--sensitivity", "--target", "h100", script)
    assert found.code == 0, found.err
    assert "0: hardly any gradient reaches the weights yet" in found.out


def test_an_unknown_target_or_space_is_refused_before_the_script_starts(script: Path) -> None:
    script.write_text("raise SystemExit('it started')", encoding="utf-8")
    assert autoprec("inspect", "--sensitivity", "--target", "h1000", script).code == 2
    found = autoprec("inspect", "--sensitivity", "--space", "hoper-fp8", script)
    assert found.code == 2
    assert "hopper-fp8" in found.err
