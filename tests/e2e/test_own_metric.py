"""A search by a metric of the script's own: what its loss would accept is refused by it, and the reverse."""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import autoprec as package
from autoprec.cli.progress import describe
from autoprec.policy import Policy
from autoprec.policy.table import policy_table
from autoprec.reports.html import html_report
from autoprec.tracking.notes import limits_of, parent_note
from autoprec.tracking.rows import trial_runs
from autoprec.trial.command import ScriptCommand
from autoprec.trial.losses import HIGHER, Series
from autoprec.trial.protocol import STILL, TrainSpec, TrialResult, TrialSpec
from autoprec.tuning.engine import Search
from autoprec.tuning.events import Listeners
from autoprec.tuning.study.records import SearchResult
from tests.cli.helpers import autoprec, short_duels
from tests.simulated import SimulatedRunner
from tests.tuning.test_engine import options, script

#: What the simulated script reports after every fourth step, from its loss.
METRICS: dict[str, Callable[[float], float]] = {
    "fragile": lambda loss: loss**8,  # its relative changes are eight times as large
    "coarse": lambda loss: loss**0.2,  # a fifth
    "f1": lambda loss: 1.0 / loss,
}


class Reporting(SimulatedRunner):
    def run(self, spec: TrialSpec) -> TrialResult:
        ran = super().run(spec)
        if not isinstance(spec, TrainSpec) or not spec.metric or not ran.ok:
            return ran
        steps = tuple(range(4, len(ran.losses) + 1, 4))
        trains = spec.perturb != STILL
        values = tuple(METRICS[spec.metric](ran.losses[step - 1 if trains else 0]) for step in steps)
        return replace(ran, metric=Series(spec.metric, spec.better == HIGHER, steps, values, tuple(METRICS)))


@functools.cache
def searched(**asked: object) -> tuple[Search, SearchResult, list[tuple[int, TrialSpec]]]:
    """Return a search of the simulated script, in a folder of its own, its answer, and what ran."""
    folder = Path(tempfile.mkdtemp(prefix="autoprec-metric-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    simulated, wanted = script(), options(study="own", trials=6, **asked)
    with contextlib.chdir(folder):
        (folder / "train.py").touch()
        command = ScriptCommand.parse(wanted.command)
        made = Search(wanted, command, Listeners(), lambda seed, _folder: Reporting(simulated, seed))
        return made, made.run(), simulated.calls


FP8, BF16 = "published:torchao-tensorwise, compiled", "all bf16"


def test_what_the_loss_accepts_a_more_sensitive_metric_refuses() -> None:
    _, by_loss, _ = searched(max_divergence=0.0025)
    _, found, _ = searched(metric="fragile", max_change=0.0025)
    assert (by_loss.verdict, by_loss.best["name"]) == ("adopt", FP8)
    assert (found.verdict, found.best["name"]) == ("adopt", BF16)
    assert f"{FP8} came out faster (3.47x over the script), but is not taken: fragile changed by 0.3" in found.reason
    assert found.best["divergence"] == pytest.approx(0.00101, rel=0.1)
    assert "divergence" not in found.reason + "".join(found.rejected.values())


def test_no_trial_by_a_metric_is_ended_early_by_its_loss() -> None:
    *_, by_metric = searched(metric="fragile", max_change=0.0025)
    *_, by_loss = searched(max_divergence=0.0025)
    trials = [spec for _, spec in by_metric if isinstance(spec, TrainSpec)]
    assert trials
    assert all(spec.metric == "fragile" and spec.stop_gap is None for spec in trials)
    assert any(isinstance(spec, TrainSpec) and spec.stop_gap for _, spec in by_loss)


def test_what_the_loss_refuses_a_less_sensitive_metric_accepts() -> None:
    _, by_loss, _ = searched(max_divergence=0.0002)
    _, found, _ = searched(metric="coarse", max_change=0.0002)
    assert by_loss.best["name"] == BF16
    assert found.best["name"] == FP8
    assert f"coarse changed by {found.best['divergence']:.3%} within 0.020%" in found.reason


def test_of_a_score_a_higher_value_is_not_worse() -> None:
    """A higher loss is a lower score: relative changes are alike, and so is the side on which they are worse."""
    made, found, _ = searched(metric="f1", better="higher", max_change=0.0025)
    _, by_loss, _ = searched(max_divergence=0.0025)
    assert found.best["name"] == by_loss.best["name"]
    assert found.best["divergence"] == pytest.approx(by_loss.best["divergence"], rel=0.2)
    assert made.state is not None
    runs = [run for run in made.state.store.records if run.kind == "preset"]
    assert runs
    assert all(run.metric == "f1" and run.higher and len(run.values) == 2 and len(run.losses) == 11 for run in runs)
    assert all(run.curve == tuple(-value for value in run.values) for run in runs)


def test_every_outlet_names_what_was_compared() -> None:
    made, found, _ = searched(metric="fragile", max_change=0.0025)
    assert found.to_json()["budget"] | {"metric": "fragile", "better": "lower", "max_change": 0.0025} == found.budget
    assert SearchResult.from_json(json.loads(json.dumps(found.to_json()))).metric == "fragile"
    assert found.limit == 0.0025
    assert "fragile change budget 0.250 %" in found.facts()
    assert "fragile change" in found.comparison()[0]
    assert "divergence" not in str(found.table())
    page = html_report(found, made.records, made.graph)
    assert "fragile change" in page
    assert "changed by" in page
    assert "fragile change" in parent_note(found)
    assert limits_of(found, {})["limit.change"] == "0.0025"
    shown = [describe(run) for run in made.records if run.ok and run.kind in ("preset", "search", "finalist")]
    assert shown
    assert all("fragile changed by" in text for text in shown)
    policy = Policy.model_validate({"evidence": {"divergence": 0.001, "metric": "fragile"}})
    assert "fragile changed by 0.100%" in str(policy_table(policy))
    assert trial_runs(made.records, found, {}, "own")


# --- the command, and a script that trains ---------------------------------------------------------------------------
SCRIPT = """\
import autoprec, torch
from torch import nn
torch.manual_seed(0)
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(256, 1024), nn.Linear(1024, 256)
    def forward(self, x):
        return self.down(torch.relu(self.up(x)))
model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
held = torch.randn(256, 256)
for step in range(40):
    x = torch.randn(256, 256)
    loss = (model(x) - x.roll(1, 1)).square().mean()
    optimizer.zero_grad(); loss.backward(); optimizer.step()
    if step % 4 == 3:
        with torch.no_grad():
            autoprec.report(eval_loss=(model(held) - held.roll(1, 1)).square().mean(), rate=1e-3)
"""
SEARCH = ("search", "-q", "--trials", "2", "--steps", "6", "--force")


@pytest.fixture
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warm: None) -> Path:
    short_duels(monkeypatch)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT, encoding="utf-8")
    return tmp_path


@pytest.mark.slow
def test_a_search_and_a_verification_by_an_evaluation(train: Path) -> None:
    found = autoprec(*SEARCH, "--metric", "eval_loss", "--max-change", "1%", "train.py")
    assert found.code == 0, found.err
    assert "eval_loss change budget 1" in found.out
    assert "eval_loss change" in found.out
    assert "divergence" not in found.out
    evidence = package.load("policy.yaml").evidence
    assert (evidence["metric"], evidence["better"], evidence["max_change"]) == ("eval_loss", "lower", 0.01)
    result = json.loads((train / "autoprec-runs" / "train" / "result.json").read_text())
    assert result["budget"]["metric"] == "eval_loss"
    options = ("--policy", "policy.yaml", "--steps", "6", "--seeds", "1", "--json")
    checked = autoprec("verify", *options, "train.py")
    assert checked.code in (0, 1, 3), checked.err
    assert checked.json()["metric"] == "eval_loss"
    assert checked.json()["limits"]["divergence"] == 0.01


@pytest.mark.slow
def test_a_metric_that_the_script_does_not_report_is_told_with_those_that_it_does(train: Path) -> None:
    found = autoprec(*SEARCH, "--metric", "eval_los", "train.py")
    assert found.code == 2
    assert "unknown metric 'eval_los'" in found.err
    assert "did you mean 'eval_loss'? valid: eval_loss, rate" in found.err
    assert not (train / "policy.yaml").exists()


def test_the_command_asks_which_values_of_a_score_are_better(train: Path) -> None:
    found = autoprec(*SEARCH, "--metric", "accuracy", "train.py")
    assert found.code == 2
    assert "--better higher" in found.err
