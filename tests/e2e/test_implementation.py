"""Losses in slices, channels last, attention written out: from `inspect` to `check`, by the real command line."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tests.cli.helpers import autoprec

SCRIPT = """
import torch
import torch.nn.functional as F
from torch import nn

class Captions(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 16, 3, padding=1), nn.Linear(16 * 16, 5000)

    def forward(self, images):
        x = F.avg_pool2d(self.stem(images), 2).view(images.size(0), 16, 16)
        return self.head((x + F.scaled_dot_product_attention(x, x, x)).flatten(1))

torch.manual_seed(0)
model = Captions()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(16):
    loss = nn.CrossEntropyLoss()(model(torch.randn(4, 3, 8, 8)), torch.randint(0, 5000, (4,)))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"loss {loss.item():.6f}")
"""
POLICY = {
    "schema": "autoprec.policy/1",
    "activations": "bf16",
    "implementation": {"loss": "chunked", "layout": "channels_last", "attention": "unfused"},
}


def test_a_script_is_told_trained_and_audited_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(SCRIPT)
    Path("policy.yaml").write_text(yaml.safe_dump(POLICY))
    Path("plain.yaml").write_text(yaml.safe_dump({"schema": "autoprec.policy/1", "activations": "bf16"}))
    shown = autoprec("inspect", "train.py").out
    assert "implementation.layout" in shown
    assert "implementation.loss" in shown
    assert "implementation.attention" in shown
    rows = autoprec("check", "--policy", "policy.yaml", "--json", "train.py").json()["operators"]
    assert {name: rows[name]["executed"] for name in rows if name.startswith("implementation")} == {
        "implementation.loss": "chunked",
        "implementation.layout": "channels_last",
        "implementation.attention": "unfused",
    }
    losses = []
    for name in ("plain.yaml", "policy.yaml"):
        capfd.readouterr()
        autoprec("run", "--policy", name, "train.py")
        lines = capfd.readouterr().out.splitlines()
        losses.append([float(line.split()[1]) for line in lines if line.startswith("loss")])
    assert losses[1] == pytest.approx(losses[0], rel=1e-2)
    assert len(losses[0]) == 16
