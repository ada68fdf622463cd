"""A script's own Muon: what it multiplies is searched, adopted, checked, taken along, and written down for others."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import autoprec as package
from autoprec.precision.hardware import cpu_bf16_units
from tests.cli.helpers import autoprec, short_duels

SCRIPT = """\
import torch
from torch import nn

class Muon(torch.optim.Optimizer):
    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            x = p.grad.to(DTYPE) / p.grad.norm()
            for _ in range(5):
                a = x @ x.T
                x = 3.4445 * x + (-4.775 * a + 2.0315 * a @ a) @ x
            p.sub_(x, alpha=0.01)

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 512), nn.Tanh(), nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 32))
optimizers = Muon([model[2].weight], {}), torch.optim.AdamW([*model[0].parameters(), *model[4].parameters()])
for step in range(40):
    x = torch.randn(64, 32)
    loss = (model(x) - x.roll(1, 1)).square().mean()
    model.zero_grad()
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
    print(f"step {step} loss {loss.item():.9f}", flush=True)
"""
SPACE = """\
schema: autoprec.space/1
name: products
choices: [{match: "*", choices: [keep]}]
optimizer: {products: [keep, bf16, fp32]}
"""


@pytest.mark.slow
def test_the_dtype_of_a_steps_products_is_found_and_carried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warm: None
) -> None:
    monkeypatch.chdir(tmp_path)
    short_duels(monkeypatch)
    slow, fast = ("bfloat16", "fp32") if cpu_bf16_units() == () else ("float32", "bf16")
    Path("train.py").write_text(SCRIPT.replace("DTYPE", f"torch.{slow}"), encoding="utf-8")
    Path("space.yaml").write_text(SPACE, encoding="utf-8")
    looked = autoprec("inspect", "train.py")
    assert f"optimizer.products: {fast}" in looked.out
    options = ("-q", "--space", "space.yaml", "--trials", "3", "--steps", "6", "--seeds", "2", "--max-divergence", "5%")
    found = autoprec("search", *options, "train.py")
    assert found.code == 0, found.err
    policy = package.load("policy.yaml")
    assert policy.optimizer.products == fast, found.out
    checked = autoprec("check", "--policy", "policy.yaml", "--json", "train.py")
    assert checked.code == 0, checked.err
    row = json.loads(checked.out)["operators"]["optimizer.products"]
    assert (row["executed"], row["reason"]) == (fast, "15 products a step")
    ran = autoprec("run", "--policy", "policy.yaml", "train.py")
    assert ran.code == 0, ran.err
    exported = autoprec("export", "policy.yaml", "--to", "torchao", "--allow-lossy")
    assert exported.code == 0, exported.err
    assert f"X = X.to(torch.{'bfloat16' if fast == 'bf16' else 'float32'})" in exported.err + exported.out
