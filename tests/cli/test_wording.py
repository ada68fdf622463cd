"""The wording of each command, in one file: its help and typical output. Other tests assert codes and data.

``python -m tests.cli.test_wording`` (part of ``make docs``) writes the files anew; their diff is what people will read.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from autoprec.cli import COMMANDS
from tests.cli.conftest import POLICY
from tests.cli.helpers import autoprec

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = Path(__file__).with_name("golden")
#: Command -> command lines whose output is kept beside its help; they run in a folder with these two policies.
TYPICAL: dict[str, list[str]] = {
    "search": ["search --max-divergence 0.25 train.py", "search --max-memory 60 train.py", "search nowhere.py"],
    "inspect": ["inspect", "inspect nowhere.py"],
    "estimate": ["estimate --target h20 config.json", "estimate --target h200 config.json"],
    "run": ["run train.py --policy policy.yaml"],
    "check": ["check --policy nowhere.yaml train.py"],
    "show": ["show policy.yaml", "show policy.yaml other.yaml", "show polcy.yaml"],
    "lint": ["lint policy.yaml", "lint broken.yaml"],
    "export": ["export policy.yaml --to torchao", "export policy.yaml --to nemo"],
    "doctor": ["doctor --targets h100", "doctor h100"],
    "transfer": ["transfer policy.yaml", "transfer policy.yaml -- names.txt"],
    "ui": ["ui", "ui --sync"],
}
FILES = {
    "policy.yaml": POLICY,
    "other.yaml": POLICY.replace("default: bf16", "default: keep"),
    "broken.yaml": "schema: autoprec.policy/1\nlayers: [1\n",
    "train.py": "",
}


def wording(name: str, folder: Path) -> str:
    """Return what a person reads of a command: help, then each typical command line with its output and exit code."""
    for file, text in FILES.items():
        (folder / file).write_text(text, encoding="utf-8")
    parts = []
    for line in (f"{name} --help", *TYPICAL.get(name, ())):
        found = autoprec(*line.split())
        parts.append(f"$ autoprec {line}\n{found.out}{found.err}[exit code {found.code}]\n")
    return "\n".join(parts).replace(str(folder.resolve()), "FOLDER")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of the files as a new process writes them: click keeps a command's help options from its first call."""
    folder = tmp_path_factory.mktemp("wording")
    subprocess.run([sys.executable, "-m", __spec__.name, str(folder)], check=True, cwd=ROOT)
    return folder


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_says_what_its_file_says(name: str, written: Path) -> None:
    said, kept = (place / f"{name}.txt" for place in (written, GOLDEN))
    assert said.read_text(encoding="utf-8") == kept.read_text(encoding="utf-8")


def test_no_file_of_a_command_that_is_gone() -> None:
    assert {path.stem for path in GOLDEN.glob("*.txt")} == set(COMMANDS)


if __name__ == "__main__":
    os.environ["COLUMNS"] = "110"
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else GOLDEN
    for name in COMMANDS:
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            (target / f"{name}.txt").write_text(wording(name, Path(folder)), encoding="utf-8")
            os.chdir("/")
