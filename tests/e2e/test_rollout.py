"""One policy for both sides of reinforcement learning: searched by their mismatch, checked, and run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import autoprec as package
from tests.cli.helpers import autoprec
from tests.trial.conftest import SCRIPTS

SEARCH = ("search", "-q", "--trials", "4", "--steps", "6", "--warmup", "2", "--force", "--target", "h100")
SCALE = ("--cost-scale", "width=64,tokens=64")
SCRIPT = ("rollout.py", "--dtype", "bfloat16")
TWO = ("--unnamed", "--frozen")  # copies of the model, and nobody says which of them generates


@pytest.fixture
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warm: None) -> Path:
    monkeypatch.chdir(tmp_path)
    shutil.copy(SCRIPTS / "rollout.py", tmp_path)
    return tmp_path


@pytest.mark.slow
def test_a_search_by_the_mismatch_finds_fp16_for_both_sides(train: Path) -> None:
    found = autoprec(*SEARCH, *SCALE, "--metric", "rollout_kl", "--max-change", "50%", *SCRIPT, "--unnamed")
    assert found.code == 0, found.err
    assert "rollout_kl is reported by AutoPrec, of the model and the only other module" in found.err
    assert "rollout_kl fell by 9" in found.out
    assert "it has the smallest rollout_kl" in found.out
    policy = package.load("policy.yaml")
    assert policy.rollout is not None
    assert (policy.activations, policy.loss_scaling) == ("fp16", "dynamic")
    assert (policy.rollout.activations, policy.rollout.weights) == ("fp16", "fp16")
    ran = autoprec("check", "--policy", "policy.yaml", "--json", *SCRIPT, "--unnamed")
    assert ran.code == 0, ran.err + ran.out
    rows = json.loads(ran.out)
    assert rows["operators"]["rollout: weights"]["executed"] == "fp16"
    assert {row["name"] for row in rows["layers"]} >= {"up", "rollout: up"}


@pytest.mark.slow
def test_a_script_that_does_not_say_which_of_its_copies_generates_is_told_so(train: Path) -> None:
    found = autoprec(*SEARCH, "--metric", "rollout_flips", "--max-change", "50%", *SCRIPT, *TWO)
    assert found.code == 2
    assert "autoprec.register(policy=model, rollout=copy)" in found.err
    (train / "policy.yaml").write_text("schema: autoprec.policy/1\nrollout: {activations: fp16}\n", encoding="utf-8")
    refused = autoprec("check", "--policy", "policy.yaml", *SCRIPT, *TWO)
    assert refused.code == 1
    assert "before the policy is applied: autoprec.register(policy=model, rollout=rollout)" in refused.err
