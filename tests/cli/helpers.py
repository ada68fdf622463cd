"""Running the command line inside this process, as fast as a function call."""

import io
import json
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autoprec.cli import cli


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
