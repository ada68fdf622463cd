"""Shared helpers: start a host for a script of tests/scripts, and policies to try."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from autoprec.trial import ScriptCommand, TrialRunner

SCRIPTS = Path(__file__).parents[1] / "scripts"


def uniform(recipe: str, match: str = "*") -> dict[str, Any]:
    return {
        "schema": "autoprec.policy/1",
        "recipes": {"bf16": {"format": "bf16"}, "fp8": {"format": "fp8", "scaling": {"granularity": "row"}}},
        "layers": [{"match": match, "recipe": recipe}],
    }


@pytest.fixture
def host(tmp_path: Path) -> Any:
    """Return a context manager: a runner for the tokens of a command, with its working directory in ``tmp_path``."""

    @contextlib.contextmanager
    def start(*tokens: str, **options: Any) -> Iterator[TrialRunner]:
        cwd = tmp_path / "user"
        cwd.mkdir(exist_ok=True)
        words = [str(SCRIPTS / t) if t.endswith(".py") else t for t in tokens]
        with TrialRunner(ScriptCommand.parse(words, cwd=cwd), run_dir=tmp_path / "run", **options) as runner:
            yield runner

    return start
