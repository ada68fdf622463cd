"""The kernel refuses what goes past the overlay (in a fork: it cannot be taken off)."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from autoprec.trial.inside.isolate.landlock import available, restrict_writes

from .test_overlay import in_fork


@pytest.mark.skipif(not available(), reason="this kernel has no Landlock")
def test_shells_and_c_libraries_cannot_write_elsewhere(tmp_path: Path) -> None:
    ours, user = tmp_path / "ours", tmp_path / "user"
    ours.mkdir()
    user.mkdir()
    (user / "precious.txt").write_text("precious")

    def work() -> None:
        assert restrict_writes([str(ours), "/dev", str(tmp_path / "missing")])
        for command in ("rm precious.txt", "echo x > precious.txt", "mkdir out", "mv precious.txt other"):
            assert subprocess.run(command, shell=True, cwd=user, capture_output=True, check=False).returncode != 0
        assert subprocess.run("cat precious.txt", shell=True, cwd=user, capture_output=True, check=True).stdout
        (ours / "x").write_text("allowed")
        os.rename(ours / "x", ours / "y")
        with pytest.raises(PermissionError):
            (user / "x").write_text("refused")

    assert in_fork(work)
    assert [p.name for p in user.iterdir()] == ["precious.txt"]
    assert (user / "precious.txt").read_text() == "precious"
