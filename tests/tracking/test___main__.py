"""``python -m autoprec.tracking``: one study is drained in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from autoprec.tracking.spool import Spool

NOBODY = "http://me:s3cret@127.0.0.1:9"


def run(study: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    known = {key: value for key, value in os.environ.items() if key != "AUTOPREC_TRACKING_STORE"}
    command = [sys.executable, "-P", "-m", "autoprec.tracking", str(study), "e", str(os.getpid())]
    paths = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    env = known | {"PYTHONPATH": paths} | environment
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)


def test_a_study_that_is_over_is_drained_at_once(tmp_path: Path) -> None:
    spool = Spool.of(tmp_path)
    spool.append("open", tracking_uri="", experiment="e", study="s")
    spool.append("end", status="FINISHED")
    done = run(tmp_path, AUTOPREC_TRACKING_STORE=NOBODY)
    assert done.returncode == 1, done.stderr  # nobody answers, and nobody is left to try again for
    state = spool.load_state(NOBODY)
    assert (state.status, state.experiment) == ("unreachable", "e")
    written = "".join(path.read_text(encoding="utf-8") for path in spool.directory.iterdir())
    assert "s3cret" not in written + done.stdout + done.stderr


def test_the_address_comes_from_the_environment_alone(tmp_path: Path) -> None:
    done = run(tmp_path)
    assert done.returncode == 1
    assert "AUTOPREC_TRACKING_STORE" in done.stderr
