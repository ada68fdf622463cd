"""kill -9 of a real search before its first trial: what was measured stays, and the answer is the same."""

from __future__ import annotations

import functools
import json
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from autoprec.cli import cli
from autoprec.policy import load_policy
from autoprec.support.plain import Document
from autoprec.trial.driver.runner import TrialRunner
from autoprec.trial.protocol import GradientErrors, ScanSpec, TrialResult, TrialSpec
from autoprec.tuning import engine  # noqa: F401  # what every fork needs
from tests.warm import Forked

pytestmark = pytest.mark.slow
SCRIPT = """\
import torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
x = torch.randn(256, 64)
y = x[:, :8].clone()
for step in range(40):
    loss = (model(x) - y).square().mean()
    optimizer.zero_grad(); loss.backward(); optimizer.step()
"""
#: Rehearsed: losses are real, and times, which differ from run to run, are modelled.
WORDS = (
    "--target",
    "h100",
    "--space",
    "hopper-fp8",
    "--cost-scale",
    "width=64,tokens=64",
    "--force",
    "--workers",
    "1",
    "--no-mlflow",
)
LENGTH = ("--trials", "2", "--seeds", "2", "--steps", "6", "--sampler", "random")


def told(path: Path, before: Callable[..., TrialResult], runner: TrialRunner, spec: TrialSpec) -> TrialResult:
    """Run a trial, and write down in a file what it was and how many probes it answered."""
    result = before(runner, spec)
    rows = result.answer.probes if isinstance(result.answer, GradientErrors) else ()
    assert not any(row.failed for row in rows), rows
    probes = [row.id for row in rows]
    line: Document = {"kind": spec.kind, "reference": spec.policy is None, "seed": runner._seed_offset}
    line |= {"perturb": getattr(spec, "perturb", ""), "probes": probes, "ok": result.ok}
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
    return result


def searching() -> None:
    """Be ``autoprec search``, as a process of its own."""
    ran, folder = TrialRunner.run, Path.cwd()
    TrialRunner.run = functools.partialmethod(_told, folder / "asked.jsonl", ran)  # type: ignore[assignment]
    cli.main(sys.argv[1:], prog_name="autoprec")


def _told(runner: TrialRunner, path: Path, ran: Callable[..., TrialResult], spec: TrialSpec) -> TrialResult:
    return told(path, ran, runner, spec)


def asked(folder: Path) -> list[Document]:
    path = folder / "asked.jsonl"
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def begin(folder: Path) -> Forked:
    return Forked(searching, "search", *WORDS, *LENGTH, "--resume", "--study", "s", "train.py", cwd=folder)


def folder_of(base: Path, name: str) -> Path:
    (base / name).mkdir()
    (base / name / "train.py").write_text(SCRIPT, encoding="utf-8")
    return base / name


def probed(folder: Path) -> int:
    """Return how many probes have left an answer behind."""
    logs = (folder / "autoprec-runs" / "s" / "hosts").glob("**/part-*.jsonl")
    return sum(log.read_bytes().count(b"\n") for log in logs)


def answered(folder: Path) -> int:
    """Return how many whole trials have left an answer behind."""
    return len(list((folder / "autoprec-runs" / "s" / "kept").glob("*-?.json")))


def killed_when(process: Forked, reached: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not reached():
        assert time.monotonic() < end
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL


def answer(folder: Path) -> tuple[object, ...]:
    policy = load_policy(folder / "policy.yaml")
    result = json.loads((folder / "autoprec-runs" / "s" / "result.json").read_text(encoding="utf-8"))
    return policy.layers, result["verdict"], result["best"], result["reference"]["step_time_ms"]


def test_a_search_that_is_killed_before_its_first_trial_goes_on_where_it_was(tmp_path: Path, warm: None) -> None:
    alone, cut = folder_of(tmp_path, "alone"), folder_of(tmp_path, "cut")
    process = begin(alone)
    output = process.communicate()
    assert process.returncode == 0, output
    whole = asked(alone)

    moments: list[Callable[[], bool]] = [
        lambda: (cut / "autoprec-runs" / "s" / "lock").exists(),  # nothing is written yet
        lambda: answered(cut) >= 2,  # the reference was run once
        lambda: probed(cut) >= 3,
        lambda: probed(cut) >= 9,
    ]
    for reached in moments:
        killed_when(begin(cut), reached)
        assert not (cut / "policy.yaml").exists(), "it was killed before it had an answer"
    process = begin(cut)
    output = process.communicate()
    assert process.returncode == 0, output
    assert answer(cut) == answer(alone)

    ran = asked(cut)
    assert counted(ran, "record") == counted(whole, "record") == {"": 1}
    references = counted(whole, "train", reference=True)
    assert sum(references.values()) >= 3
    again = counted(ran, "train", reference=True)
    assert all(again[key] <= references[key] for key in references), (again, references)
    probes = Counter(probe for row in ran if row["kind"] == ScanSpec.kind for probe in row["probes"])
    once = Counter(probe for row in whole if row["kind"] == ScanSpec.kind for probe in row["probes"])
    assert probes.keys() <= once.keys()
    assert sum(once.values()) - sum(probes.values()) >= 9, "those of the sessions that were killed are not asked again"
    assert not (cut / "autoprec-runs" / "s" / "kept").exists()


def counted(rows: list[Document], kind: str, *, reference: bool | None = None) -> dict[str, int]:
    found = [row for row in rows if row["kind"] == kind and reference in (None, row["reference"]) and not row["seed"]]
    return dict(Counter(row["perturb"] for row in found))
