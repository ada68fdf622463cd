from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autoprec.policy import Policy, save_policy
from autoprec.support.files import write_json
from autoprec.trial.command import ScriptCommand
from autoprec.tuning.events import SearchInfo
from autoprec.tuning.options import SearchOptions
from autoprec.tuning.phases.concluded import asked, keep_answer, kept_answer
from autoprec.tuning.study.records import SearchResult
from tests.simulated import simulated_graph

INFO = SearchInfo(
    study="mine",
    study_dir="runs/mine",
    storage="sqlite:///x",
    script="train.py",
    target="h100",
    source="modelled",
    launch="fork",
    device="cpu",
    model={"class": "Net", "parameters": 8},
    groups={"fc": ("fc.0", "fc.1")},
    trials=30,
    resume_command="autoprec search --resume",
)
RESULT = SearchResult(
    verdict="adopt",
    reason="1.2x",
    policy="policy.yaml",
    best={"speedup": 1.2},
    reference={"speedup": 1.0},
    presets=(),
    front=(),
    trials={"complete": 3},
    study_name="mine",
    storage="sqlite:///x",
    mlflow={},
    seconds=1.0,
    stopped="converged after 3 of 30 trials: nothing left",
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("import torch\n")
    (tmp_path / "space.yaml").write_text("one")
    write_json(tmp_path / "graph.json", simulated_graph(1).to_json())
    save_policy(Policy(evidence={"verdict": "adopt"}), tmp_path / "best.yaml")
    return tmp_path


def question(**changes: Any) -> dict[str, Any]:
    options = replace(SearchOptions(command=("train.py",), space="space.yaml"), **changes)
    return asked(options, ScriptCommand.parse(options.command))


def test_an_answer_is_read_as_it_was_kept(folder: Path) -> None:
    keep_answer(folder, question(), INFO, RESULT, 5)
    kept = kept_answer(folder, question(), 5)
    assert kept is not None
    info, graph, result, policy = kept
    assert (info["groups"], info["device"], info["notes"]) == (INFO.groups, "cpu", ())
    assert not {"storage", "options", "resume_command"} & info.keys()  # they are those of the search that resumes it
    assert (result, policy.evidence) == (RESULT, {"verdict": "adopt"})
    assert graph.to_json() == simulated_graph(1).to_json()


def test_what_says_only_where_it_runs_asks_nothing_else_and_a_limit_does(folder: Path) -> None:
    keep_answer(folder, question(), INFO, RESULT, 5)
    elsewhere = {"trials": 60, "output": "other.yaml", "workers": 2, "resume": True, "track": False, "study": "mine"}
    assert kept_answer(folder, question(**elsewhere), 5) is not None
    for change in ({"max_divergence": 0.01}, {"budget_s": 60.0}, {"sampler": "tpe"}, {"objective": "memory"}):
        assert kept_answer(folder, question(**change), 5) is None


@pytest.mark.parametrize("name", ["train.py", "space.yaml"])
def test_an_edited_file_asks_something_else(folder: Path, name: str) -> None:
    keep_answer(folder, question(), INFO, RESULT, 5)
    (folder / name).write_text("two = 2\n")
    assert kept_answer(folder, question(), 5) is None


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("options.metadata.version", "2.0"),
        ("target.platform.node", "elsewhere"),
        ("target.cpu_model", "another processor"),
        ("target.listed_gpus", ["GPU 0: NVIDIA H100 (UUID: GPU-1)", "  MIG 1g.10gb Device 0: (UUID: MIG-2)"]),
    ],
)
def test_another_version_machine_or_device_asks_something_else(
    folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, other: object
) -> None:
    keep_answer(folder, question(), INFO, RESULT, 5)
    monkeypatch.setattr(f"autoprec.tuning.{name}", lambda *_: other)
    assert kept_answer(folder, question(), 5) is None


def test_another_visible_gpu_asks_something_else(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep_answer(folder, question(), INFO, RESULT, 5)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    assert kept_answer(folder, question(), 5) is None


def test_nothing_is_answered_from_runs_that_came_later_or_from_a_damaged_file(folder: Path) -> None:
    keep_answer(folder, question(), INFO, RESULT, 5)
    assert kept_answer(folder, question(), 6) is None
    for name in ("best.yaml", "graph.json", "answer.json"):
        text = (folder / name).read_text()
        (folder / name).write_text(text[: len(text) // 2])
        assert kept_answer(folder, question(), 5) is None
        (folder / name).write_text(text)
    assert kept_answer(folder, question(), 5) is not None


@pytest.mark.parametrize(
    "change", [{"stopped": "ran all 30 trials"}, {"cut_short": "the time budget"}, {"verdict": "undecided"}]
)
def test_only_an_answer_that_no_further_run_could_change_is_kept(folder: Path, change: dict[str, str]) -> None:
    keep_answer(folder, question(), INFO, replace(RESULT, **change), 5)  # type: ignore[arg-type]
    assert kept_answer(folder, question(), 5) is None


def test_an_answer_whose_policy_was_written_over_is_not_kept(folder: Path) -> None:
    """A session with another objective that runs nothing writes another ``best.yaml`` beside as many runs."""
    keep_answer(folder, question(), INFO, RESULT, 5)
    keep_answer(folder, question(objective="memory"), INFO, replace(RESULT, stopped="ran all 30 trials"), 5)
    assert kept_answer(folder, question(), 5) is None


def test_more_trials_ask_something_else_of_a_sampler_that_plans_by_their_number(folder: Path) -> None:
    keep_answer(folder, question(sampler="tpe"), INFO, replace(RESULT, stopped="exhausted the space"), 5)
    assert kept_answer(folder, question(sampler="tpe"), 5) is not None
    assert kept_answer(folder, question(sampler="tpe", trials=60), 5) is None
