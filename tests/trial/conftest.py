"""Shared helpers: hosts for the scripts of tests/scripts, forked from this process so that torch is imported once."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

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


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs without inductor's C++; what the first one of a process imports is imported here, once for all forks."""
    plain = torch.compile
    monkeypatch.setattr(torch, "compile", lambda model, **more: plain(model, **{**more, "backend": "aot_eager"}))
    torch.ones((), requires_grad=True).backward()  # or a build with CUDA could not be forked any more
    torch.compile(torch.nn.Linear(2, 2))(torch.ones(1, 2)).sum().backward()
