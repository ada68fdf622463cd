"""What a process becomes, and that nothing of it begins before its step."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from torch import nn

from autoprec.trial.inside import agent
from autoprec.trial.inside.agent import Agent


def test_a_run_without_a_policy_installs_nothing() -> None:
    agent = Agent({"mode": "run", "policy": None})
    call = nn.Module.__call__
    agent.install()
    assert nn.Module.__call__ is call


@pytest.mark.parametrize(("version", "loaded"), [((3, 6, 15), False), (sys.version_info[:3], True)])
def test_an_older_python_that_a_script_starts_is_left_alone(
    tmp_path: Path, version: tuple[int, ...], loaded: bool
) -> None:
    """Python 3.6 said "Error in sitecustomize", a SyntaxError, on the stderr of what a script had started."""
    entry = Path(agent.__file__).with_name("_inject") / "sitecustomize.py"
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"mode": "run"}))
    program = (
        f"import runpy, sys; sys.version_info = {version!r}; "
        f"runpy.run_path({str(entry)!r}); print('autoprec' in sys.modules)"
    )
    environment = os.environ | {"AUTOPREC_TRIAL": str(config)}
    done = subprocess.run([sys.executable, "-S", "-c", program], env=environment, capture_output=True, check=True)
    assert (done.stdout.decode().strip(), done.stderr) == (str(loaded), b"")
