"""A script that forks, daemonises, patches torch, swallows everything or eats all memory harms only its own trial."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest

from autoprec.errors import NoSpaceError
from autoprec.trial.command import ScriptCommand
from autoprec.trial.driver.runner import TrialRunner
from autoprec.trial.processes import marked_processes
from autoprec.trial.protocol import TrainSpec

SCRIPT = Path(__file__).with_name("hostile.py")
#: what it does -> the only statuses that are right, and what the reason says
CASES: dict[str, tuple[tuple[str, ...], str]] = {
    "fork": (("ok",), ""),
    "daemon": (("ok",), ""),
    "daemon_then_crash": (("crashed",), "exit code 5"),
    "patch": (("crashed", "diverged"), ""),
    "chdir": (("ok",), ""),
    "swallow": (("ok",), ""),
    "output": (("ok",), ""),
    "allocator": (("oom",), "allocate memory"),
    "python_memory": (("oom",), "MemoryError"),
    "cuda_text": (("oom",), "CUDA out of memory"),
    "stubborn_family": (("hung",), "no result within"),
}
#: these change nothing that is measured
HARMLESS = ("daemon", "chdir", "output")


def sleepers() -> list[str]:
    """Processes that only the script can have started."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found += [path.parent.name] if b"987654" in path.read_bytes() else []
        except OSError:
            continue
    return found


def _host(runner: TrialRunner) -> int:
    """Return the process that was started for the script."""
    assert runner._host is not None
    return runner._host.pid


@pytest.mark.slow
def test_a_hostile_script_harms_only_its_own_trial(tmp_path: Path) -> None:
    wish = tmp_path / "wish.txt"
    wish.write_text("nothing")
    command = ScriptCommand.parse((str(SCRIPT), str(wish)), cwd=tmp_path)
    spec = TrainSpec(steps=6, warmup=1, timeout_s=60)
    with TrialRunner(command, run_dir=tmp_path / "runs") as runner:
        before, pid = runner.run(spec), _host(runner)
        for kind, (statuses, reason) in CASES.items():
            wish.write_text(kind)
            began = time.monotonic()
            limit = 2.0 if kind == "stubborn_family" else 60.0
            result = runner.run(TrainSpec(steps=6, warmup=1, timeout_s=limit))
            spent = time.monotonic() - began
            assert result.status in statuses, (kind, result.status, result.reason, result.tail)
            assert reason in result.reason, (kind, result.reason)
            assert spent < limit + 5, (kind, spent)
            assert kind not in HARMLESS or result.losses == before.losses, kind
            deadline = time.monotonic() + 5
            while sleepers() and time.monotonic() < deadline:
                time.sleep(0.02)
            assert sleepers() == [], kind
        wish.write_text("full_disk")
        with pytest.raises(NoSpaceError, match="No space left") as full:
            runner.run(spec)
        assert "TMPDIR" in full.value.fix
        wish.write_text("nothing")
        after = runner.run(spec)
        assert (after.losses, _host(runner)) == (before.losses, pid)
        mark, log = runner.mark, tmp_path / "runs"
    assert marked_processes(mark) == []
    assert sum(f.stat().st_size for f in log.rglob("*") if f.is_file()) < 8 * 2**20
    print(f"{len(CASES) + 1} hostile acts, 0 harmed another trial, 0 processes left")


@pytest.mark.slow
@pytest.mark.usefixtures("warm")  # each host is a fork: five that import PyTorch would show nothing else
def test_a_killed_host_is_replaced_and_its_trial_run_again_within_a_limit(tmp_path: Path) -> None:
    wish = tmp_path / "wish.txt"
    wish.write_text("nothing")
    command = ScriptCommand.parse((str(SCRIPT), str(wish)), cwd=tmp_path)
    spec = TrainSpec(steps=6, warmup=1, timeout_s=60)
    with TrialRunner(command, run_dir=tmp_path / "runs") as runner:
        expected = runner.run(spec)
        for _ in range(4):  # more often than a host may be lost in a row: every good trial in between starts anew
            subprocess.run(["kill", "-KILL", str(_host(runner))], check=True)
            result = runner.run(spec)
            assert result.losses == expected.losses, result
    print("4 hosts killed, 4 replaced, 0 trials lost")
