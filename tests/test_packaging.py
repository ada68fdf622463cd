"""The way from a checkout to a command: pinned versions, make targets, continuous integration, what the wheel holds."""

import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def name(requirement: str) -> str:
    return re.split(r"[<>=!\[; ]", requirement, maxsplit=1)[0].lower()


def pins() -> dict[str, list[str]]:
    out: dict[str, list[str]] = {}
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            out.setdefault(name(line), []).append(line)
    return out


def test_every_dependency_is_pinned() -> None:
    needed = PROJECT["project"]["dependencies"] + PROJECT["project"]["optional-dependencies"]["dev"]
    stubs = {"types-pyyaml"}  # follow PyYAML and cannot break a run
    assert {name(line) for line in needed} - set(pins()) - stubs == set()


def test_linux_gets_the_cpu_build_and_never_several_gigabytes_by_surprise() -> None:
    on_linux = [line for line in pins()["torch"] if 'sys_platform == "linux"' in line]
    assert on_linux == ['torch==2.13.0+cpu ; sys_platform == "linux"']


def test_pins_satisfy_what_the_project_asks_for() -> None:
    for line in PROJECT["project"]["dependencies"]:
        oldest = [int(part) for part in line.split(">=")[1].split(".")]
        pinned = re.findall(r"==([\d.]+)", pins()[name(line)][0])[0]
        assert [int(part) for part in pinned.split(".") if part] >= oldest, line


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
@pytest.mark.parametrize(
    ("target", "runs"),
    [
        ("demo", "autoprec demo"),
        ("test", "-m pytest"),
        ("gpu", "benchmarks/gpu_run.py"),
        ("gpu-bundle", "benchmarks/gpu_bundle.py"),
    ],
)
def test_make_targets(target: str, runs: str) -> None:
    line = ["make", "-n", target, "VENV=/nowhere/venv"]
    found = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=True)
    assert runs in found.stdout
    assert "constraints.txt" in found.stdout, "every target installs under the pinned versions"


def test_continuous_integration_runs_the_whole_suite() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert "make test" in script.read_text(encoding="utf-8")


def test_data_files_travel_with_the_wheel() -> None:
    wheel = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert wheel["packages"] == ["autoprec"]
    assert wheel["force-include"] == {
        "search_spaces": "autoprec/search_spaces",
        "examples/train_gpt.py": "autoprec/examples/train_gpt.py",  # what `autoprec demo` trains
    }
    assert all((ROOT / path).exists() for path in wheel["force-include"])
    assert (ROOT / "autoprec" / "py.typed").exists()


def test_the_licence_is_apache() -> None:
    assert PROJECT["project"]["license"] == "Apache-2.0"
    assert "Apache License" in (ROOT / "LICENSE").read_text(encoding="utf-8")[:400]
