"""Shared helpers: hosts for the scripts of tests/scripts, forked from this process so that torch is imported once."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import os
import runpy
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from autoprec.trial.command import ScriptCommand
from autoprec.trial.driver.process_tree import ProcessTree
from autoprec.trial.driver.runner import TrialRunner

SCRIPTS = Path(__file__).parents[1] / "scripts"


def uniform(recipe: str, match: str = "*") -> dict[str, Any]:
    return {
        "schema": "autoprec.policy/1",
        "recipes": {"bf16": {"format": "bf16"}, "fp8": {"format": "fp8", "scaling": {"granularity": "row"}}},
        "layers": [{"match": match, "recipe": recipe}],
    }


class ForkedScript(ProcessTree):
    """Runs ``python script.py args`` in a fork of this process instead of a new interpreter (seconds cheaper)."""

    def __init__(self, argv: Sequence[str], env: Mapping[str, str], cwd: Path, mark: str, log: Path | None) -> None:
        reader, writer = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            _run_script(list(argv[1:]), dict(env), cwd, writer)
        os.close(writer)
        self._code: int | None = None
        super().__init__(reader, mark, log)

    def poll(self) -> int | None:
        if self._code is None:
            done, status = os.waitpid(self.pid, os.WNOHANG)
            if done:
                self._code = os.waitstatus_to_exitcode(status)
        return self._code

    def wait(self, timeout_s: float) -> int | None:
        import time

        end = time.monotonic() + timeout_s
        while self.poll() is None and time.monotonic() < end:
            time.sleep(0.005)
        return self._code


def _run_script(argv: list[str], env: dict[str, str], cwd: Path, output: int) -> None:
    code = 0
    try:
        os.setsid()
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.stdout, sys.stderr = open(1, "w", buffering=1, closefd=False), open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
        faulthandler.enable(file=sys.stderr)
        os.environ.clear()
        os.environ.update(env)
        os.chdir(cwd)
        import warnings

        import torch

        warnings.resetwarnings()
        torch.set_num_threads(1)
        atexit._clear()
        sys.argv, sys.path[0] = argv, str(Path(argv[0]).parent)
        from autoprec.trial.inside import agent

        agent.install(env["AUTOPREC_TRIAL"])
        runpy.run_path(argv[0], run_name="__main__")
    except SystemExit as stop:
        code = int(stop.code or 0)
    except BaseException:
        code = 1
        sys.excepthook(*sys.exc_info())
        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        os._exit(code)


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a context manager: a runner for a command, working in ``tmp_path/user``; ``real=True`` starts Python."""

    @contextlib.contextmanager
    def start(*tokens: str, real: bool = False, **options: Any) -> Iterator[TrialRunner]:
        if not real:
            import torch._dynamo  # noqa: F401  (what any first optimizer imports; once here, not in every fork)

            monkeypatch.setattr("autoprec.trial.driver.runner.NewProcess", ForkedScript)
        cwd = tmp_path / "user"
        cwd.mkdir(exist_ok=True)
        words = [str(SCRIPTS / t) if t.endswith(".py") else t for t in tokens]
        with TrialRunner(ScriptCommand.parse(words, cwd=cwd), run_dir=tmp_path / "run", **options) as runner:
            yield runner

    return start
