"""Random programs of file operations in a trial: none of the user's files is changed, by any of the nets."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from autoprec.trial.inside.isolate import landlock, savers
from autoprec.trial.inside.isolate.isolation import isolate
from autoprec.trial.inside.isolate.overlay import Overlay
from autoprec.trial.inside.isolate.overlay_calls import install
from tests.faults.file_programs import build, run_program, snapshot
from tests.trial.inside.isolate.test_namespace import needs_mounts
from tests.trial.inside.isolate.test_overlay import in_fork

SEEDS = 60


@pytest.mark.parametrize("kernel", [False, True], ids=["overlay alone", "with Landlock"])
def test_random_programs_change_nothing(tmp_path: Path, kernel: bool) -> None:
    if kernel and not landlock.available():
        pytest.skip("this kernel has no Landlock: children are not held back")
    user, other = build(tmp_path)
    before = snapshot(user, other)
    for seed in range(SEEDS):
        (tmp_path / "layers" / str(seed)).mkdir(parents=True)

    def work() -> None:
        os.chdir(user)
        overlay = Overlay(str(tmp_path / "layers" / "0"), [str(user), str(other)], [str(tmp_path / "layers")])
        if kernel:
            assert landlock.restrict_writes([str(tmp_path / "layers"), "/dev"])
        savers.install(overlay)
        install(overlay)
        for seed in range(SEEDS):
            overlay.layers[:], overlay.cwd = [str(tmp_path / "layers" / str(seed))], None
            overlay._masks.clear()
            run_program(seed, user, children=kernel and seed % 4 == 0)

    assert in_fork(work)
    assert snapshot(user, other) == before


@needs_mounts
def test_random_programs_and_their_children_work_on_the_kernels_copy(tmp_path: Path) -> None:
    user, other = build(tmp_path)
    before = snapshot(user, other)
    private = tmp_path / "private"
    private.mkdir()
    config = {"cwd": str(user), "script": str(other / "train.py"), "private": str(private), "run_dir": str(private)}

    def work() -> None:
        os.chdir(user)
        overlay = isolate(config)
        assert overlay.mounted == (str(other), str(user))
        for seed in range(SEEDS // 2):
            run_program(seed, user)
        assert subprocess.run(f"echo x > {user}/child.txt", shell=True, check=True)
        assert os.path.exists(user / "child.txt")

    assert in_fork(work)
    assert snapshot(user, other) == before
