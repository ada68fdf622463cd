"""Running the command line inside this process, as fast as a function call."""

import io
import json
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from autoprec.cli import cli


def short_duels(patch: pytest.MonkeyPatch) -> None:
    """How surely one policy is faster than another is not looked at: the fewest rounds of short blocks."""
    from autoprec.trial.inside import forked_duel
    from autoprec.tuning.phases import duels

    for name in ("_FIRST_S", "_EACH_S", "AGAIN_S", "PRECISE"):
        patch.setattr(duels, name, 1.0)
    patch.setattr(duels, "_SHORT_BLOCK_S", 0.01)
    for name in ("_BLOCK_S", "_SETTLING_S"):
        patch.setattr(forked_duel, name, 0.05)


@dataclass
class Outcome:
    code: int
    out: str
    err: str

    def json(self) -> Any:
        return json.loads(self.out)


def autoprec(*args: str | Path) -> Outcome:
    """Run ``autoprec ARGS`` and return its exit code, stdout and stderr."""
    out, err = io.StringIO(), io.StringIO()
    code: Any = None
    with redirect_stdout(out), redirect_stderr(err):
        try:
            cli.main([str(arg) for arg in args])
        except SystemExit as leaving:
            code = leaving.code
    return Outcome(code if isinstance(code, int) else 0, out.getvalue(), err.getvalue())
