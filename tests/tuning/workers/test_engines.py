from __future__ import annotations

from pathlib import Path

import pytest

from autoprec.trial.command import ScriptCommand
from autoprec.trial.driver.runner import TrialRunner
from autoprec.tuning.options import SearchOptions
from autoprec.tuning.workers.engines import gpu_slots, runner_factory
from autoprec.tuning.workers.slots import SlotRunner


def runner(folder: Path, gpus: str, monkeypatch: pytest.MonkeyPatch, **changes: object) -> object:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
    (folder / "train.py").write_text("")
    command = ScriptCommand.parse(("train.py",), cwd=folder)
    made = runner_factory(SearchOptions(("train.py",), **changes), command)(0, folder / "runs")  # type: ignore[arg-type]
    made.close()
    return made


def test_several_gpus_are_slots_and_one_or_none_is_a_plain_runner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert isinstance(runner(tmp_path, "", monkeypatch), TrialRunner)
    assert isinstance(runner(tmp_path, "0", monkeypatch), TrialRunner)
    four = runner(tmp_path, "0,1,2,3", monkeypatch)
    assert isinstance(four, SlotRunner)
    assert four.size == 4
    assert getattr(runner(tmp_path, "0,1,2,3", monkeypatch, workers=2), "size", 0) == 2
    assert getattr(runner(tmp_path, "0,1,2,3", monkeypatch, workers=1), "size", 0) == 1
    busy = {"1": "70000", "3": "70000"}
    monkeypatch.setattr("autoprec.tuning.workers.slots.ask_driver", lambda fields, gpu: busy.get(gpu, "4"))
    two = runner(tmp_path, "0,1,2,3", monkeypatch)
    assert isinstance(two, SlotRunner)
    assert [slot._environment["CUDA_VISIBLE_DEVICES"] for slot in two._slots] == ["0", "2"]  # type: ignore[attr-defined]
    assert len(two._notes) == 2


@pytest.mark.parametrize(("asked", "alone"), [({}, True), ({"target": "h100"}, False), ({"workers": 2}, False)])
def test_what_the_first_look_compiles_is_for_trials_that_run_alone(
    asked: dict[str, object], alone: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = runner(tmp_path, "", monkeypatch, **asked)
    assert isinstance(made, TrialRunner)
    assert made._alone is alone


def test_the_gpus_of_the_slots() -> None:
    assert gpu_slots(["4", "5", "6"], 1) == ["4", "5", "6"]
    assert gpu_slots(["4", "5", "6"], 2) == ["4,5"]


@pytest.mark.parametrize(
    ("words", "slots"),
    [
        (("--nproc-per-node", "2"), ["0,1", "2,3"]),
        (("--nproc_per_node=4",), []),
        (("--nproc-per-node=gpu",), []),
        (("--standalone",), ["0", "1", "2", "3"]),
        (("--nproc-per-node", "8"), []),
    ],
)
def test_a_trial_gets_a_gpu_for_each_process_that_its_launcher_starts(
    words: tuple[str, ...], slots: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    (tmp_path / "train.py").write_text("")
    command = ScriptCommand("launcher", "torchrun", (*words, "train.py", "--nproc-per-node=7"), tmp_path)
    made = runner_factory(SearchOptions(("train.py",)), command)(0, tmp_path / "runs")
    made.close()
    found = [runner._environment["CUDA_VISIBLE_DEVICES"] for runner in getattr(made, "_slots", [])]
    assert found == slots  # one trial on all GPUs needs no slots
