"""``autoprec doctor``."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from autoprec.backends import BACKENDS
from autoprec.cli.machine import doctor
from autoprec.cost.device import cpu
from autoprec.precision.recipes import BUILTIN_RECIPES
from tests.cli.helpers import Outcome, autoprec
from tests.documents import ROOT


@pytest.fixture(scope="module")
def found() -> Any:
    """What it says in a process of its own: what a library prints while it is imported is printed once per process."""
    command = [sys.executable, "-m", "autoprec", "doctor", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300, cwd=ROOT)
    assert done.stderr == ""
    return json.loads(done.stdout)


def test_everything_is_listed_and_every_no_has_a_reason(found: Any) -> None:
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


def test_emulation_runs_everything(found: Any) -> None:
    rows = [row for row in found["recipes"] if row["backend"] == "emulated"]
    assert rows
    assert all(row["ok"] for row in rows)


def test_the_tables_say_what_the_document_says(found: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "diagnose", lambda: found | {"environment": {"OPTUNA_STORAGE": "sqlite:///x.db"}})
    out = autoprec("doctor").out
    assert "OPTUNA_STORAGE=sqlite:///x.db" in out
    assert torch.cuda.is_available() or "no GPU is usable" in out
    assert "cores; int8: " in out
    assert "GFLOP/s on one thread" in found["devices"][0]["note"]


def test_a_cpu_whose_products_fail_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> dict[str, float]:
        raise RuntimeError("no kernel\nfor this")

    monkeypatch.setattr(cpu, "measure", fails)
    assert "no product could be timed: no kernel" in doctor._devices(torch)[0]["note"]


def targets(*names: str) -> Outcome:
    return autoprec("doctor", "--targets", *names)


def test_the_table_lists_every_target_with_its_date() -> None:
    found = targets()
    assert found.code == 0
    assert "NVIDIA H100 SXM5 80GB" in found.out
    assert "dense TFLOP/s" in found.out
    assert "2024-03" in found.out
    assert "74.5 GiB" in found.out
    assert " GB " not in found.out, "memory has one unit in every command"


def test_a_name_shows_the_whole_entry() -> None:
    found = targets("A100")
    assert found.code == 0
    entry = yaml.safe_load(found.out[found.out.index("name: ") :])
    assert entry["source"].startswith("NVIDIA A100")
    assert not entry["recipes"]["fp8_row"]["ok"]
    assert entry["recipes"]["fp8_row"]["reason"].startswith("compute capability 8.0 multiplies no FP8")
    assert "H100" not in found.out
    block = yaml.safe_load(targets("h200").out.partition("\n\n")[2])["recipes"]["fp8_block"]
    assert (block["ok"], block["needs"], block["multiple_of"]) == (True, "CUDA 12.9", 128)


def test_json_has_units_in_the_names() -> None:
    found = targets("h200", "cpu", "--json")
    h200, cpu = json.loads(found.out)["targets"]
    assert h200["peaks_tflops"]["bf16"] == 989
    assert h200["bandwidth_bytes_per_s"] == 4.8e12
    assert h200["recipes"]["mxfp8"]["ok"] is False
    assert (h200["units"], h200["recipes"]["fp8_row"]["multiple_of"]) == (132, 16)
    assert cpu["vendor"] == "cpu"


def test_unknown_names_are_refused() -> None:
    found = targets("h10")
    assert found.code == 2
    assert "'h100'" in found.err


def test_a_users_own_file(tmp_path: Path) -> None:
    path = tmp_path / "own.yaml"
    path.write_text(
        """schema: autoprec.targets/1
targets:
  card: {title: Card, vendor: other, architecture: hopper, capability: "1", units: 8, memory: 8, bandwidth: 800,
         peaks: {bf16: 50}, links: {}, source: me, date: "2026-02"}
"""
    )
    for name in (str(path), f"{path}:card"):
        found = targets(name)
        assert found.code == 0
        assert "Card" in found.out
        assert "h100" not in found.out
    assert targets(f"{path}:cart").code == 2


def test_names_belong_to_the_table() -> None:
    assert autoprec("doctor", "h100").code == 2
