"""Shared helpers: hosts for the scripts of tests/scripts, forked from this process so that torch is imported once."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from autoprec.trial.command import ScriptCommand
from autoprec.trial.driver.runner import TrialRunner
from tests.warm import warm_scripts

SCRIPTS = Path(__file__).parents[1] / "scripts"


def uniform(recipe: str, match: str = "*") -> dict[str, Any]:
    return {
        "schema": "autoprec.policy/1",
        "recipes": {"bf16": {"format": "bf16"}, "fp8": {"format": "fp8", "scaling": {"granularity": "row"}}},
        "layers": [{"match": match, "recipe": recipe}],
    }


@pytest.fixture
def host(tmp_path: Path) -> Any:
    """Return a context manager: a runner for a command, working in ``tmp_path/user``; ``real=True`` starts Python."""

    @contextlib.contextmanager
    def start(*tokens: str, real: bool = False, **options: Any) -> Iterator[TrialRunner]:
        cwd = tmp_path / "user"
        cwd.mkdir(exist_ok=True)
        words = [str(SCRIPTS / t) if t.endswith(".py") else t for t in tokens]
        command = ScriptCommand.parse(words, cwd=cwd)
        warm = contextlib.nullcontext() if real else warm_scripts()
        with warm, TrialRunner(command, run_dir=tmp_path / "run", **options) as runner:
            yield runner

    return start
