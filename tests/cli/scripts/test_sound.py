"""``autoprec check`` without a policy."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autoprec.cli.recording import running
from autoprec.cli.scripts import sound
from autoprec.cli.scripts.sound import record
from autoprec.graph.census import Judged
from autoprec.graph.report import GraphReport
from autoprec.trial.lifted import LiftedLines
from autoprec.trial.protocol import TrialResult
from benchmarks.precision.running import FAULTY
from tests.cli.helpers import autoprec

pytestmark = pytest.mark.usefixtures("warm")
SOUND = """
import torch
net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
for _ in range(4):
    loss = net(torch.randn(4, 8)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def test_a_sound_script_is_said_to_be_and_what_was_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(SOUND)
    found = autoprec("check", "train.py")
    assert (found.code, found.out.startswith("the script's own precision is sound")) == (0, True), found.err
    assert "operators" in found.out
    assert "all lines lifted to fp64 at once: the gradient changes by 0.000%" in found.out
    census = autoprec("inspect", "train.py")
    assert "optimizer state" in census.out
    assert "exp_avg_sq of" in autoprec("inspect", "--json", "train.py").out


_BARE = """
import torch
from torch import nn
import torch.nn.functional as F
torch.manual_seed(0)
MADE
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(4):
    loss = use(torch.randn(4, 16).bfloat16()).float().square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
_MADE = {
    "a dict": "net = nn.ParameterDict({'a': torch.ones(16, 16)})\ndef use(x): return x @ net['a'].to(x.dtype) * LOST",
    "a list": "net = nn.ParameterList([torch.ones(16, 16)])\ndef use(x): return F.linear(x, net[0].to(x.dtype)) * LOST",
    "a table": "net = nn.Embedding(8, 16)\ndef use(x): return net(x[:, 0].int() % 8) * LOST",
    "parameters": "class Net(nn.Module):\n  def __init__(s):\n    super().__init__()\n"
    "    s.table = nn.Parameter(torch.ones(16, 16))\n  def forward(s, x):\n"
    "    return x @ s.table.to(x.dtype) * LOST\nnet = use = Net()",
}


def bare(made: str) -> int:
    """Write a script whose model has no layer that a policy could decide about; return its line that loses digits."""
    text = _BARE.replace("MADE", _MADE[made].replace("LOST", "((x + 500) - 500)"))
    Path("train.py").write_text(text)
    return 1 + next(i for i, line in enumerate(text.splitlines()) if "+ 500" in line)


@pytest.mark.parametrize(("command", "made"), [("check", "a list"), ("check", "a table"), ("lint", "parameters")])
def test_a_model_without_a_layer_for_a_policy_is_judged(
    command: str, made: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    line = bare(made)
    found = autoprec(command, *["--"] * (command == "lint"), "train.py")
    assert f"train.py:{line}: error: the " in found.out, found.err
    assert "of bf16 values loses digits" in found.out
    assert found.code == 1


def test_a_model_without_a_layer_for_a_policy_has_a_census_and_no_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    bare("a dict")
    assert "parameter" in autoprec("inspect", "train.py").out
    assert "no trainable GEMM" in autoprec("inspect", "--sensitivity", "train.py").err


def test_what_was_not_lifted_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(
        SOUND.replace("torch.nn.Linear(8, 2))", "torch.nn.Linear(8, 2)).double()").replace(
            "torch.randn(4, 8)", "torch.randn(4, 8).double()"
        )
    )
    found = autoprec("check", "train.py")
    assert "no line was lifted: nothing in this step is computed in 32 or 16 bits" in found.out


def test_lifting_is_not_announced_where_ranks_train_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks read "the step again, with lines lifted", and then that no line was lifted."""

    @contextmanager
    def of_ranks(*args: Any, **named: Any) -> Iterator[tuple[Any, Any, str]]:
        with running(*args, **named) as (runner, host, label):
            yield runner, replace(host, world_size=ranks), label

    monkeypatch.setattr(sound, "running", of_ranks)
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(SOUND)
    for ranks in (2, 1):
        found = autoprec("check", "train.py")
        assert found.code == 0, found.err
        assert ("the step again" in found.err) is (ranks == 1)


def test_a_step_that_was_not_judged_is_not_called_sound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unjudged(*args: Any) -> GraphReport:
        return replace(record(*args), judged=Judged(unseen=("the step was not judged: of its own reason",)))

    monkeypatch.setattr(sound, "record", unjudged)
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(SOUND)
    found = autoprec("check", "train.py")
    assert (found.code, "is sound" in found.out) == (0, False)
    assert "note: the step was not judged: of its own reason" in found.err
    assert autoprec("check", "--json", "train.py").json()["sound"] is False


def test_a_fault_is_named_by_line_and_ends_with_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text((FAULTY / "adamw_on_bfloat16_weights.py").read_text())
    found = autoprec("check", "--json", "train.py")
    document = found.json()
    assert (found.code, document["ok"], document["sound"]) == (1, False, False)
    first = document["findings"][0]
    assert (first["code"], first["file"], first["line"]) == ("updates-lost", "train.py", 9)
    assert first["figures"]["unchanged"] > 0.9
    assert document["judged"]["census"]
    assert document["lifted"]["wide"] == "fp32"
    assert 0 < document["lifted"]["every"] < 0.2
    text = autoprec("lint", "--", "train.py")
    assert (text.code, text.out.startswith("train.py:9: error: 9")) == (1, True)


ANSWER = LiftedLines(rows=({"where": "train.py:3"},), every=0.01, noise=1e-4)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (ANSWER, ""),
        (replace(ANSWER, every=0.099), ""),
        (replace(ANSWER, every=0.3, noise=0.2), ""),  # a step that any last bit moves
        (LiftedLines(), ""),
        (None, ""),
        (replace(ANSWER, every=1.03), "changes by 103.000%; begin with the first lines below"),
        (replace(ANSWER, every=0.2, rows=(), left=3), "changes by 20.000%; no line of them was lifted alone"),
        (replace(ANSWER, every=None), "the gradient is not finite: this step cannot show"),
        (replace(ANSWER, every=None, rows=(), alike=2), "the gradient is not finite: this step cannot show"),
    ],
)
def test_a_step_that_lifting_changes_or_that_is_not_finite_is_not_called_sound(
    answer: LiftedLines | None, said: str
) -> None:
    told = sound._doubt(TrialResult("ok", answer=answer))
    assert (said in told, bool(told)) == (True, bool(said))


def test_a_place_in_a_package_begins_with_its_name() -> None:
    assert sound._place("/env/lib/python3.11/site-packages/accelerate/utils/operations.py:9", "/home") == (
        "accelerate/utils/operations.py:9"
    )
    assert sound._place("/home/train.py:3", "/home") == "train.py:3"


def test_what_is_about_a_policy_needs_one() -> None:
    found = autoprec("check", "--numerics", "train.py")
    assert (found.code, "--policy FILE" in found.err) == (2, True)
