"""A function as a script: imported where a new process can, pickled by value where not, refused with the reason."""

from __future__ import annotations

import asyncio
import functools
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from autoprec.errors import UsageError
from autoprec.trial.function_script import function_script

HELD: list[str] = []


def importable() -> None:
    HELD.append("called")


def run(script: Path, cwd: Path) -> str:
    return subprocess.run([sys.executable, script], cwd=cwd, capture_output=True, text=True, check=True).stdout


def test_what_can_be_imported_is_imported(tmp_path: Path) -> None:
    script = function_script(importable, tmp_path)
    assert script.name == "importable.py"
    assert "from tests.trial.test_function_script import importable" in script.read_text()
    assert list(script.parent.iterdir()) == [script], "nothing is pickled"
    assert function_script(importable, tmp_path) == script


def test_a_closure_is_taken_along_with_what_it_names(tmp_path: Path) -> None:
    rate = 0.25

    def train(steps: int = 3) -> None:
        print("trained", steps, rate)

    script = function_script(train, tmp_path)
    pickled = script.with_suffix(".pkl")
    assert pickled.stat().st_mode & 0o077 == 0
    assert run(script, tmp_path) == "trained 3 0.25\n"
    other = function_script(functools.partial(train, steps=7), tmp_path)
    assert other != script, "another run does not replace what a search still starts"
    assert function_script(train, tmp_path) == script


def test_a_lambda_has_a_file_name(tmp_path: Path) -> None:
    assert function_script(lambda: None, tmp_path).name == "function.py"


async def coroutine() -> None:
    await asyncio.sleep(0)


def needs(config: Any, *, lr: float) -> None: ...


LOCK = threading.Lock()


def holds_a_lock() -> Any:
    lock = threading.Lock()

    def train() -> None:
        lock.acquire()

    return train


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (3, "not this int"),
        (threading.Thread, "not the class Thread"),
        (coroutine, "coroutine"),
        (needs, r"it needs config, lr\n  fix: .*partial\(needs, config=..., lr=...\)"),
        (holds_a_lock(), "cannot be taken to another process"),
    ],
)
def test_what_cannot_be_run_is_refused(function: Any, says: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=says):
        function_script(function, tmp_path)
    assert list(tmp_path.iterdir()) == []
