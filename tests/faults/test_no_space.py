"""A disk that fills up, a folder that vanishes or cannot be written: a clear end, and the search can be continued."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from autoprec.errors import NoSpaceError, StudyError
from autoprec.policy import load_policy
from autoprec.trial.command import ScriptCommand
from autoprec.tuning.engine import Search
from autoprec.tuning.events import Listeners
from autoprec.tuning.options import SearchOptions
from tests.simulated import SimulatedRunner, SimulatedScript, simulated_graph

pytestmark = pytest.mark.slow
DRIVER = Path(__file__).with_name("cli_driver.py")
ROOT = Path(__file__).resolve().parents[2]
#: Of the file system, in KiB: room for a study, not for its search. Every other moment is the k-th write's, below.
SIZE = 190
FILL = """
mount -t tmpfs -o size="$1"k none "$2" || exit 99
cd "$2"
"$3" "$4" 0 search -q --trials 8 --seeds 2 --study s
echo "exit $?"
mount -o remount,size=64m "$2"
"$3" "$4" 0 search -q --trials 8 --seeds 2 --study s --resume --no-mlflow
echo "exit $?"
cp policy.yaml "$5"
"""


def may_mount() -> bool:
    """Say whether this process may mount a file system in a namespace of its own."""
    tried = ["unshare", "--mount", "sh", "-c", "mount -t tmpfs none /tmp"]
    return shutil.which("unshare") is not None and subprocess.run(tried, capture_output=True).returncode == 0


def options(**changes: Any) -> SearchOptions:
    values: dict[str, Any] = {
        "command": ("train.py",),
        "study": "s",
        "trials": 8,
        "steps": 8,
        "seeds": 2,
        "space": "hopper-fp8",
        "force": True,
    }
    return SearchOptions(**(values | changes))


def search(**changes: Any) -> Search:
    script = SimulatedScript(graph=simulated_graph(2, width=4096, tokens=16384), device="NVIDIA H100 80GB HBM3")
    asked = options(**changes)
    command = ScriptCommand.parse(asked.command)
    return Search(asked, command, Listeners(), lambda seed, _: SimulatedRunner(script, seed))


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()


def test_a_file_system_that_fills_up(tmp_path: Path) -> None:
    if not may_mount():
        pytest.skip("needs the right to mount a small file system (unshare --mount)")
    search().run()
    expected = load_policy("policy.yaml")
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    place, out = tmp_path / "disk", tmp_path / "policy.yaml.out"
    place.mkdir()
    words = ["unshare", "--mount", "sh", "-c", FILL, "sh", str(SIZE), *map(str, (place, sys.executable, DRIVER))]
    done = subprocess.run([*words, str(out)], env=environment, capture_output=True, text=True, timeout=600)
    said = done.stdout + done.stderr
    first, last = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("exit ")]
    assert first == "6", said
    assert "no space left" in said
    assert last == "0", said
    assert "Traceback" not in said
    assert load_policy(out).layers == expected.layers


def test_no_room_at_the_kth_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every write of ours ends in one fsync: the k-th fails."""
    search(study="plain", trials=4).run()
    expected = load_policy("policy.yaml")
    sync, kth, places = os.fsync, 1, 0
    while True:
        left = [kth]

        def failing(handle: int, left: list[int] = left) -> None:
            left[0] -= 1
            if left[0] == 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            sync(handle)

        monkeypatch.setattr(os, "fsync", failing)
        try:
            search(study=f"s{kth}", trials=4).run()
        except NoSpaceError:
            monkeypatch.setattr(os, "fsync", sync)
            study = tmp_path / "autoprec-runs" / f"s{kth}"
            assert not list(study.rglob("*.tmp"))
            resumed = search(study=f"s{kth}", trials=4, resume=True)
            assert resumed.run().policy == "policy.yaml"
            assert load_policy("policy.yaml").layers == expected.layers
            kth, places = 3 * kth, places + 1
        else:
            break
    assert kth > 16
    print(f"no room at {places} places: NoSpaceError each, all continued to the same policy")


@pytest.mark.parametrize("loss", ["the folder", "the database"])
def test_a_study_that_vanishes_while_it_runs(loss: str, tmp_path: Path) -> None:
    script = SimulatedScript(graph=simulated_graph(2, width=4096, tokens=16384), device="NVIDIA H100 80GB HBM3")
    folder, aside = tmp_path / "autoprec-runs" / "s", tmp_path / "aside"

    class Vanishing(SimulatedRunner):
        def run(self, spec: Any) -> Any:
            if len(script.calls) == 8:
                (folder if loss == "the folder" else folder / "study.db").rename(aside)
            return super().run(spec)

    with pytest.raises(StudyError, match="is gone or cannot be written") as gone:
        Search(
            options(), ScriptCommand.parse(("train.py",)), Listeners(), lambda seed, _: Vanishing(script, seed)
        ).run()
    assert "put its folder back" in gone.value.fix
    assert "--resume" in gone.value.fix
    if loss == "the folder":
        shutil.rmtree(folder, ignore_errors=True)  # what was written there since
        aside.rename(folder)
    else:
        aside.rename(folder / "study.db")
    assert search(resume=True).run().policy == "policy.yaml"


def test_a_folder_that_cannot_be_written_is_named_with_the_cause() -> None:
    if not may_mount():
        pytest.skip("needs the right to mount a read-only file system (unshare --mount)")
    words = 'mount -t tmpfs -o ro none "$1" && cd "$1" && exec "$2" -m autoprec search "$3"'
    Path("disk").mkdir()
    script = Path("train.py").absolute()
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", words, "sh", "disk", sys.executable, str(script)],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 2, done.stderr
    assert "Read-only file system" in done.stderr
    assert "fix:" in done.stderr
    assert "Traceback" not in done.stderr
