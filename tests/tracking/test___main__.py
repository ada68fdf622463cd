"""``python -m autoprec.tracking``: the process beside a search."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.tracking.conftest import make_study

NOBODY = "http://me:s3cret@127.0.0.1:9"


def run(study: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    known = {key: value for key, value in os.environ.items() if not key.startswith("AUTOPREC_TRACKING")}
    command = [sys.executable, "-P", "-m", "autoprec.tracking", str(study)]
    paths = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    env = known | {"PYTHONPATH": paths} | environment
    return subprocess.run(command, env=env, input="", capture_output=True, text=True, timeout=120, check=False)


def test_a_study_that_is_over_is_tried_once(tmp_path: Path) -> None:
    folder = make_study(tmp_path / "s")
    done = run(folder.path, AUTOPREC_TRACKING_STORE=NOBODY, AUTOPREC_TRACKING_STUDY="")
    assert done.returncode == 1, done.stderr  # no server answers, and no search is left to try again for
    (logged,) = map(json.loads, done.stdout.splitlines())
    assert "does not answer" in logged["reason"]
    written = "".join(path.read_text(encoding="utf-8") for path in folder.own.iterdir())
    assert "s3cret" not in written + done.stdout + done.stderr


def test_the_address_comes_from_the_environment_alone(tmp_path: Path) -> None:
    done = run(tmp_path)
    assert done.returncode == 1
    assert "AUTOPREC_TRACKING_STORE" in done.stderr
