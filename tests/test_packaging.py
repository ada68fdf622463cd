"""The way from a checkout to a command: pinned versions, make targets, continuous integration, what the wheel holds."""

import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

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
        ("site", "mkdocs build --strict"),
        ("gpu-bundle", "benchmarks/gpu/bundle.py"),
    ],
)
def test_make_targets(target: str, runs: str) -> None:
    line = ["make", "-n", target, "VENV=/nowhere/venv"]
    found = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=True)
    assert runs in found.stdout
    assert "constraints.txt" in found.stdout, "every target installs under the pinned versions"


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_a_gpu_machine_never_gets_a_build_for_cpus() -> None:
    for build, asked in (("cuda", False), ("cpu", True)):
        line = ["make", "-n", "demo", "VENV=/nowhere/venv", f"TORCH={build}"]
        found = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=True)
        assert ("download.pytorch.org/whl/cpu" in found.stdout) is asked
        assert ("2>/dev/null" in found.stdout) is asked, "why pip failed is shown"


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_make_gpu_installs_nothing_where_everything_is_there(tmp_path: Path) -> None:
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text(f"#!/bin/sh\necho $@ >> {tmp_path}/calls\n")
    python.chmod(0o755)
    subprocess.run(["make", "gpu", f"VENV={tmp_path}"], cwd=ROOT, capture_output=True, check=True)
    assert "pip" not in (tmp_path / "calls").read_text()
    assert "benchmarks/gpu/first.py" in (tmp_path / "calls").read_text()


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


REPOSITORY = PROJECT["project"]["urls"]["Repository"]
VERSION = re.findall(r'"(\d+\.\d+\.\d+)"', (ROOT / "autoprec" / "_version.py").read_text())[0]


def document(name: str) -> dict[Any, Any]:
    return dict(yaml.safe_load((ROOT / name).read_text(encoding="utf-8")))


def test_links_that_a_package_index_shows_lead_to_files_of_the_repository() -> None:
    """On an index there is nothing beside the README that a relative link could lead to."""
    links = re.findall(r"\]\(([^)#]+)", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert links
    for link in links:
        assert link.startswith(f"{REPOSITORY}/blob/main/"), link
        assert (ROOT / link.removeprefix(f"{REPOSITORY}/blob/main/")).exists(), link
    for name in (*PROJECT["project"]["urls"].values(), document("mkdocs.yml")["repo_url"]):
        assert name.startswith((REPOSITORY, PROJECT["project"]["urls"]["Documentation"]))


def test_every_extra_that_installs_anywhere_is_in_all() -> None:
    extras = PROJECT["project"]["optional-dependencies"]
    (line,) = extras["all"]
    assert set(line.removeprefix("autoprec[").rstrip("]").split(",")) == set(extras) - {"all", "te", "dev", "docs"}


def test_the_workflow_runs_this_suite_on_every_python_that_is_promised() -> None:
    jobs = document(".github/workflows/ci.yml")["jobs"]
    promised = [c.rpartition(" ")[2] for c in PROJECT["project"]["classifiers"] if re.search(r":: 3\.\d+$", c)]
    assert jobs["tests"]["strategy"]["matrix"]["python"] == promised
    lines = {name: [step.get("run", "") for step in job["steps"]] for name, job in jobs.items()}
    assert "bash .ci/run" in lines["tests"]
    assert "python -m build" in lines["package"]
    assert "make site" in lines["docs"]
    assert "--strict" in (ROOT / "Makefile").read_text(encoding="utf-8").split("\nsite:")[1]


def test_what_names_a_version_names_the_same() -> None:
    assert document("CITATION.cff")["version"] == VERSION
    assert f"\n## {VERSION}\n" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    (ruff,) = [one for one in document(".pre-commit-config.yaml")["repos"] if one["repo"].endswith("ruff-pre-commit")]
    assert pins()["ruff"] == [f"ruff=={ruff['rev'].removeprefix('v')}"]
    assert f"ARG TORCH={re.findall(r'==([0-9.]+)', pins()['torch'][1])[0]}\n" in (ROOT / "Dockerfile").read_text()


def test_the_top_level_holds_what_people_look_for_and_nothing_else() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a checkout")
    assert {name.split("/")[0] for name in listed.stdout.splitlines()} == {
        *("README.md", "pyproject.toml", "constraints.txt", "Makefile", "mkdocs.yml", "Dockerfile"),
        *("LICENSE", "CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "SECURITY.md"),
        *(
            ".ci",
            ".github",
            "action.yml",
            ".gitignore",
            ".dockerignore",
            ".pre-commit-config.yaml",
            ".pre-commit-hooks.yaml",
        ),
        *("autoprec", "search_spaces", "examples", "tests", "benchmarks", "docs"),
    }
