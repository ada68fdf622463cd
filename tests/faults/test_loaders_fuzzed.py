"""The loaders of policies and spaces under hostile input: clear errors, no code, bounded memory and time."""

import importlib.util
import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.faults.bad_documents import BOMBS, HEADS, bomb
from tests.faults.fuzzing import MEMORY

ROOT = Path(__file__).resolve().parents[2]


def fuzz(module: str, *words: str) -> dict[str, Any]:
    ended = subprocess.run(
        [sys.executable, "-m", module, *words], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    return dict(json.loads(ended.stdout.splitlines()[-1]))


def judge(found: dict[str, Any], inputs: int) -> None:
    print({key: value for key, value in found.items() if key != "crashes"})
    assert found["inputs"] == inputs
    assert set(found["outcomes"]) <= {"policy valid", "policy refused", "space valid", "space refused"}, found[
        "crashes"
    ]
    assert found["code executed"] == 0, found["events"]
    assert found["slowest_s"] < 1.0, found["slowest_input"]
    assert found["memory_bytes"] < MEMORY


def test_mutated_documents_and_bombs(tmp_path: Path) -> None:
    found = fuzz("tests.faults.fuzzing", "--count", "800", "--seed", "7", "--folder", str(tmp_path))
    judge(found, 800)
    assert min(found["outcomes"].values()) > 10, "both loaders accept some and refuse some"


def test_every_bomb_at_its_largest(tmp_path: Path) -> None:
    found = fuzz("tests.faults.fuzzing", "--each-bomb", "100000", "--folder", str(tmp_path))
    judge(found, 2 * len(BOMBS) * len(HEADS))


@pytest.mark.skipif(importlib.util.find_spec("atheris") is None, reason="atheris is not installed")
def test_guided_by_coverage(tmp_path: Path) -> None:
    judge(fuzz("tests.faults.guided", "2000", "7", str(tmp_path)), 2000)


def test_the_watch_sees_code_that_runs(tmp_path: Path) -> None:
    """The count of zero above is worth something only if the hook would have seen one."""
    code = (
        "import yaml, autoprec.support.files, pathlib, json\n"
        "from tests.faults.fuzzing import Fuzz, warm\n"
        f"fuzz = Fuzz(pathlib.Path({str(tmp_path)!r})); warm(fuzz)\n"
        "autoprec.support.files.parse_yaml = lambda text: yaml.unsafe_load(text)\n"
        "fuzz.load('policy', b\"a: !!python/object/apply:os.system ['true']\")\n"
        "print(fuzz.report()['code executed'])\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert int(ended.stdout) > 0


def test_bombs_are_the_same_for_the_same_seed() -> None:
    assert bomb(random.Random(1), 10_000) == bomb(random.Random(1), 10_000)
