"""A user's session, in order: search, look, check, verify what is claimed, run, load, export."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import autoprec as package
from tests.cli.helpers import Outcome, autoprec, short_duels
from tests.warm import run_forked

pytestmark = pytest.mark.slow

SCRIPT = """\
import sys, torch
from torch import nn
torch.manual_seed(0)
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(256, 1024), nn.Linear(1024, 256)
    def forward(self, x):
        return self.down(torch.relu(self.up(x)))
if __name__ == "__main__":
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(40):
        x = torch.randn(256, 256)
        loss = (model(x) - x.roll(1, 1)).square().mean()
        optimizer.zero_grad(); loss.backward(); optimizer.step()
        print(f"step {step} loss {loss.item():.9f}", flush=True)
    torch.save(model.state_dict(), "weights.pt")
"""
OPTIONS = ("-q", "--trials", "3", "--steps", "6", "--seeds", "2", "--force")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("session")
    (path / "train.py").write_text(SCRIPT, encoding="utf-8")
    return path


@pytest.fixture(scope="module", autouse=True)
def _short_duels() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        short_duels(patch)
        yield


@pytest.fixture(scope="module")
def searched(folder: Path, warm: None, _short_duels: None) -> Outcome:
    before = Path.cwd()
    os.chdir(folder)
    try:
        return autoprec("search", *OPTIONS, "--json", "train.py")
    finally:
        os.chdir(before)


@pytest.fixture(autouse=True)
def _there(folder: Path, searched: Outcome, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)


def test_the_search_answers_on_stdout_and_writes_only_what_it_says(searched: Outcome, folder: Path) -> None:
    assert searched.code == 0, searched.err
    result = searched.json()
    keys = "verdict reason policy best reference presets front trials study storage mlflow seconds".split()  # noqa: SIM905
    assert set(keys) <= set(result)
    assert result["verdict"] in ("adopt", "stay")
    assert 1 <= result["trials"]["complete"] <= 3
    assert {path.name for path in folder.iterdir()} <= {"train.py", "policy.yaml", "autoprec-runs", "__pycache__"}
    assert result["best"]["divergence"] <= 0.0025


def test_the_emitted_policy_is_valid_and_says_how_it_was_found() -> None:
    assert autoprec("lint", "policy.yaml").code == 0
    document = autoprec("show", "policy.yaml", "--json").json()["policy"]
    assert document["evidence"]["target"] == "cpu"
    assert document["evidence"]["source"] == "measured"
    assert document["model"]["class"] == "Net"


def test_what_it_asks_for_is_executed() -> None:
    found = autoprec("check", "--policy", "policy.yaml", "--json", "train.py")
    assert found.code == 0, found.err
    assert [row["name"] for row in found.json()["layers"]] == ["up", "down"]


def run(*words: str) -> subprocess.CompletedProcess[str]:
    root = str(Path(package.__file__).resolve().parent.parent)
    line = [sys.executable, *words]
    settings = {**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1"}
    return subprocess.run(line, env=settings, capture_output=True, text=True, timeout=300, check=True)


@pytest.fixture(scope="module")
def plain(folder: Path, searched: Outcome) -> str:
    ended = run_forked(["train.py"], folder)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_an_empty_policy_changes_no_bit_and_the_script_may_save(folder: Path, plain: str) -> None:
    (folder / "empty.yaml").write_text("schema: autoprec.policy/1\n", encoding="utf-8")
    weights = torch.load("weights.pt", weights_only=True)
    Path("weights.pt").unlink()
    ended = run("-m", "autoprec", "run", "--policy", "empty.yaml", "train.py")
    assert ended.stdout == plain
    assert "emulated" not in ended.stderr
    again = torch.load("weights.pt", weights_only=True)
    assert all(torch.equal(weights[name], again[name]) for name in weights)


@pytest.mark.usefixtures("warm")
def test_the_policy_trains_like_the_script_within_the_budget(plain: str, capfd: pytest.CaptureFixture[str]) -> None:
    def losses(text: str) -> list[float]:
        return [float(line.split()[-1]) for line in text.splitlines() if line.startswith("step")]

    reference = losses(plain)
    ran = autoprec("run", "--policy", "policy.yaml", "train.py")
    assert ran.code == 0, ran.err
    found = losses(capfd.readouterr().out)
    assert len(found) == len(reference) == 40
    gaps = [abs(a - b) / abs(b) for a, b in zip(found[20:], reference[20:], strict=True)]
    assert sum(gaps) / len(gaps) <= 0.005


def test_loading_and_applying_in_python() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(256, 1024), nn.Linear(1024, 256)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.down(torch.relu(self.up(x)))
            return out

    model, x = Net(), torch.randn(8, 256)
    before = model(x)
    policy = package.load("policy.yaml")
    policy.apply(model)
    optimizer = policy.wrap_optimizer(torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0))
    model(x).sum().backward()
    optimizer.step()
    assert policy.audit(model).ok
    policy.remove(model)
    assert torch.equal(model(x), before)


def test_the_study_lies_beside_the_script(searched: Outcome, folder: Path) -> None:
    study = folder / "autoprec-runs" / searched.json()["study"]
    assert json.loads((study / "result.json").read_text()) == searched.json()
    assert (study / "report.html").stat().st_size > 1000


def test_a_resumed_search_repeats_nothing(searched: Outcome) -> None:
    study = searched.json()["study"]
    again = autoprec("search", *OPTIONS, "--json", "--resume", "--study", study, "train.py")
    assert again.code == 0, again.err
    before, after = (ran.json()["trials"] for ran in (searched, again))
    assert after["stopped"].startswith(("converged after", "ran the", "exhausted"))
    ended = before["stopped"].startswith(("converged", "exhausted"))  # else times are noisy: one more may be worth it
    assert before["complete"] <= after["complete"] <= before["complete"] + (0 if ended else 1)
    assert (after["failed"], after["pruned"]) == (before["failed"], before["pruned"])


def test_a_study_that_exists_is_continued_only_when_asked_and_as_it_was_begun(searched: Outcome) -> None:
    study = searched.json()["study"]
    again = autoprec("search", *OPTIONS, "--study", study, "train.py")
    assert (again.code, "--resume" in again.err) == (5, True), again.err
    changed = autoprec("search", *OPTIONS, "--steps", "8", "--resume", "--study", study, "train.py")
    assert (changed.code, "steps" in changed.err) == (5, True), changed.err
