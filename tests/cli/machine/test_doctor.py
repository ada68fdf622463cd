"""``autoprec doctor``."""

import json
import subprocess
import sys

import pytest
import torch

from autoprec.backends import BACKENDS
from autoprec.cli.machine.doctor import _choices, diagnose
from autoprec.cost.calibrate import calibration
from autoprec.cost.calibrate.linears import LINEAR_SHAPES, Linear
from autoprec.precision.recipes import BUILTIN_RECIPES
from tests.cli.helpers import autoprec
from tests.documents import ROOT


def test_everything_is_listed_and_every_no_has_a_reason() -> None:
    found = autoprec("doctor", "--json").json()
    assert found["torch"] == torch.__version__
    assert found["devices"][0]["device"] == "cpu"
    assert {row["backend"] for row in found["backends"]} == set(BACKENDS)
    assert {row["recipe"] for row in found["recipes"]} == set(BUILTIN_RECIPES)
    assert not any(row["experimental"] for row in found["backends"] if row["device"] == "cpu")
    for row in (*found["backends"], *found["recipes"]):
        assert row["reason"], row
    packages = [row["package"] for row in found["packages"]]
    assert len(packages) == len(set(packages))
    for row in found["packages"]:
        assert row["ok"] or "pip install" in row["note"] or "build it: https://" in row["note"]


def test_emulation_runs_everything_everywhere() -> None:
    rows = [row for row in diagnose()["recipes"] if row["backend"] == "emulated"]
    assert rows
    assert all(row["ok"] for row in rows)


def test_settings_from_the_environment_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPTUNA_STORAGE", "sqlite:///x.db")
    assert "OPTUNA_STORAGE=sqlite:///x.db" in autoprec("doctor").out


def test_who_runs_which_recipe_by_auto_is_said_of_every_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = [
        {"device": "cpu", "name": "a CPU"},
        {"device": "cuda:0", "name": "Calibrated"},
        {"device": "cuda:1", "name": "Other"},
    ]
    rows = [
        Linear("fp8_rowwise", backend, "eager", LINEAR_SHAPES[0], seconds, 0.01, 0.03).to_json()
        for backend, seconds in (("native", 5e-3), ("torchao", 4e-3))
    ]
    monkeypatch.setattr(calibration, "kept_calibration", {"Calibrated": {"linears": rows}}.get)
    assert _choices(devices) == [
        {"device": "cuda:0", "choice": "eager: torchao: 1.25x native at fp8_rowwise, measured"},
        {
            "device": "cuda:1",
            "choice": "native runs every recipe: `autoprec calibrate` here times the other backends beside it",
        },
    ]


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_machine_without_a_gpu_is_told_why() -> None:
    assert "no GPU is usable" in autoprec("doctor").out


def test_it_is_quiet_and_says_what_is_slow_here() -> None:
    """In a process of its own, for what a library prints while it is imported is printed once per process."""
    command = [sys.executable, "-m", "autoprec", "doctor", "--json"]
    found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300, cwd=ROOT)
    assert found.stderr == ""
    here = json.loads(found.stdout)["here"]
    assert here["bf16_ratio"] >= 0
    assert here["means"]
