"""When times are not to be trusted: throttled or shared GPUs, and compilation in the timed steps."""

from __future__ import annotations

import subprocess
import time
from types import SimpleNamespace

import pytest
import torch

from autoprec.trial.inside.observe import conditions
from autoprec.trial.inside.observe.conditions import (
    Conditions,
    ask_driver,
    read_conditions,
    still_compiling,
    unreliable,
)

FINE = "1755, 1980, 54, Not Active, Not Active, Not Active, Not Active"
HOT = "1215, 1980, 91, Not Active, Active, Active, Not Active"


def test_a_line_of_nvidia_smi_is_read() -> None:
    assert Conditions.parse(FINE, 5) == Conditions(1755, 1980, 54, (), 5)
    assert Conditions.parse(HOT).slowed == ("hardware thermal slowdown", "software thermal slowdown")


@pytest.mark.parametrize("line", ["", "garbage", "[N/A], [N/A], [N/A], [N/A], [N/A], [N/A], [N/A]"])
def test_what_a_driver_does_not_say_speaks_against_nothing(line: str) -> None:
    assert unreliable(Conditions.parse(line), Conditions.parse(line)) == ""


def test_reasons() -> None:
    fine = Conditions.parse(FINE)
    assert unreliable(fine, fine) == ""
    assert unreliable(None, fine) == unreliable(fine, None) == ""
    assert "throttled (hardware thermal slowdown" in unreliable(fine, Conditions.parse(HOT))
    assert "900 of 1980 MHz" in unreliable(fine, Conditions(900, 1980))
    assert "took 3.0 GiB" in unreliable(fine, Conditions(1755, 1980, foreign_memory=3 << 30))
    assert "gave back" in unreliable(Conditions(foreign_memory=3 << 30), fine)


def test_compilation_is_seen_step_by_step() -> None:
    assert still_compiling([4, 4], warmup=0) == ""
    assert still_compiling([0, 2, 3, *[3] * 8], warmup=2) == ""
    assert still_compiling([0, 2, 2, 2, 3, *[3] * 6], warmup=2) == ""
    assert "4 of 8 timed steps" in still_compiling([0, 1, 1, 1, 2, 3, 4, 5, 5, 5, 5], warmup=2)


def test_only_gpus_are_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_conditions(torch.device("cpu")) is None
    asked: list[list[str]] = []

    spun: list[int] = []

    def run(command: list[str], **_: object) -> SimpleNamespace:
        asked.append(command)
        before = len(spun)
        while len(spun) < before + 3:  # a driver of eight GPUs takes its time
            time.sleep(0.001)
        return SimpleNamespace(stdout=FINE + "\n")

    monkeypatch.setattr(conditions.subprocess, "run", run)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _d: (10, 110))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _d: 70)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _d: SimpleNamespace(uuid="ab-cd"))
    monkeypatch.setattr(torch.cuda, "_sleep", spun.append, raising=False)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _d: time.sleep(0.0001))
    assert read_conditions(torch.device("cuda")) == Conditions(1755, 1980, 54, (), 30)
    assert len(spun) >= 3  # busy until it has answered: the clock of an idle GPU says nothing
    assert asked[0][-1] == "GPU-ab-cd"

    def missing(command: list[str], **_: object) -> SimpleNamespace:
        raise subprocess.CalledProcessError(9, command)

    monkeypatch.setattr(conditions.subprocess, "run", missing)
    assert read_conditions(torch.device("cuda")) == Conditions(foreign_memory=30)
    assert ask_driver(["name"]) == ""


def test_without_a_name_the_first_gpu_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(command: list[str], **_: object) -> SimpleNamespace:
        assert command == ["nvidia-smi", "--query-gpu=name,power.draw", "--format=csv,noheader,nounits"]
        return SimpleNamespace(stdout="A100, 71.2\nA100, 64.0\n")

    monkeypatch.setattr(conditions.subprocess, "run", run)
    assert ask_driver(["name", "power.draw"]) == "A100, 71.2"
