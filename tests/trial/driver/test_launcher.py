"""What the runners of one command share."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from autoprec.trial.command import ScriptCommand
from autoprec.trial.driver.launcher import Launcher, ZygoteProcess


def test_one_launcher_per_command_until_the_last_leaves(tmp_path: Path) -> None:
    command = ScriptCommand("script", "train.py", (), tmp_path)
    first, second = Launcher.join(command), Launcher.join(ScriptCommand("script", "train.py", (), tmp_path))
    assert first is second
    assert first.new_mark() != first.new_mark()
    assert first.new_mark().startswith(first.mark)
    assert not first.ready
    assert first.fork({}, {}, "m", None) is None  # no zygote yet
    folder = Path(first.address).parent
    first.leave()
    assert folder.exists()
    second.leave()
    assert not folder.exists()
    third = Launcher.join(command)
    assert third is not first
    third.leave()


def test_a_process_whose_zygote_is_lost_is_seen_to_be_gone() -> None:
    reader, writer = os.pipe()
    forked = ZygoteProcess(reader, "autoprec-test", None)
    gone = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    forked.set_pid(gone.pid)
    assert forked.wait(0.5) is None  # it lives
    gone.kill()
    gone.wait()
    began = time.monotonic()
    assert forked.wait(20.0) == -signal.SIGKILL
    assert time.monotonic() - began < 5
    os.close(writer)
