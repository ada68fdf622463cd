"""The README: short, and its commands work, in order, in a fresh folder."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.helpers import autoprec, short_duels
from tests.documents import ROOT, commands

README = (ROOT / "README.md").read_text(encoding="utf-8")
TRAIN = """\
import argparse, torch
from torch import nn
parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=0.01)
parser.add_argument("--config")
args = parser.parse_args()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
for step in range(60):
    x = torch.randn(64, 64)
    loss = (model(x) - x.roll(1, 1)).square().mean()
    optimizer.zero_grad(); loss.backward(); optimizer.step()
print("trained", step + 1, "steps")
"""
#: The README's policy names blocks.*.fc and head; this one fits the script above.
POLICY = """\
schema: autoprec.policy/1
recipes: {bf16: {format: bf16}}
default: bf16
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("readme")
    (path / "train.py").write_text(TRAIN, encoding="utf-8")
    (path / "package").mkdir()
    (path / "package" / "__init__.py").touch()
    (path / "package" / "train.py").write_text(TRAIN, encoding="utf-8")
    (path / "policy.yaml").write_text(POLICY, encoding="utf-8")
    return path


def run(folder: Path, words: list[str]) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    line = [sys.executable, "-m", *words]
    return subprocess.run(line, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False)


def test_it_is_short() -> None:
    assert len(README.split()) <= 600


def test_it_shows_the_real_output_of_a_real_run() -> None:
    (block,) = re.findall(r"```text\n(.*?)```", README, re.DOTALL)
    assert "verdict: adopt" in block
    assert "noise floor" in block


def test_both_make_commands_are_there_with_what_they_do_and_how_long() -> None:
    lines = {words[1]: line for line in README.splitlines() if (words := line.split())[:1] == ["make"]}
    assert set(lines) == {"demo", "test"}
    assert all("#" in line and "minutes" in line for line in lines.values())


USING = [words for _, words in commands() if _.startswith("README") and words[0] == "autoprec" and words[1] != "search"]


@pytest.mark.slow
@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize("words", USING, ids=" ".join)
def test_commands_that_use_a_policy_work(folder: Path, words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    if words[1] == "export":
        words = [*words, "--layers", "layers.txt", "--allow-lossy", "-o", "exported"]
        (folder / "layers.txt").write_text("0\n2\n", encoding="utf-8")
    if words[1] == "verify":
        words = [*words[:2], "--steps", "6", "--seeds", "1", *words[2:]]
        short_duels(monkeypatch)
    monkeypatch.chdir(folder)
    found = autoprec(*words[1:])
    # A model this small may well gain nothing: then `verify` says so with exit code 1.
    assert found.code in ((0, 1) if words[1] == "verify" else (0,)), found.err
    assert "Traceback" not in found.err


@pytest.mark.slow
def test_a_search_emits_a_policy_that_loads(folder: Path) -> None:
    """As a user runs it: every process is a new one. (Duels, of a second each, are those of e2e/test_a_session.py.)"""
    options = ["--target", "h100", "--trials", "2", "--steps", "4", "--seeds", "1", "--force", "--no-mlflow", "--json"]
    found = run(folder, ["autoprec", "search", *options, "--output", "found.yaml", "train.py", "--lr", "3e-4"])
    assert found.returncode == 0, found.stderr
    shown = autoprec("show", folder / "found.yaml")
    assert shown.code == 0, shown.err
