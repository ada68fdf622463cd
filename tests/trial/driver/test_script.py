"""`autoprec run`: the script to its own end, under a policy."""

from __future__ import annotations

import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from autoprec.trial.command import ScriptCommand
from autoprec.trial.driver.script import _with_notes, run_script
from autoprec.trial.inside.policy_run import APPLIED, LEFT, REFUSED
from tests.trial.conftest import SCRIPTS, uniform
from tests.warm import run_forked

ROOT = Path(__file__).parents[3]
CODE = (
    "import json, sys; from autoprec.trial.command import ScriptCommand;"
    "from autoprec.trial.driver.script import run_script;"
    "policy, audit, *words = sys.argv[1:];"
    "sys.exit(run_script(ScriptCommand.parse(words), json.loads(policy), audit=audit or False))"
)


def run(policy: object, audit: str, *words: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-c", CODE, json.dumps(policy), audit, *words]
    return subprocess.run(argv, capture_output=True, text=True, check=False, cwd=ROOT)


@pytest.mark.slow
@pytest.mark.usefixtures("warm")
def test_a_policy_is_audited_and_told_to_be_emulated(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """That an empty one changes no bit and says nothing is tested in tests/e2e, with a new process."""
    script = str(SCRIPTS / "plain.py")
    plain = run_forked([script, "--steps", "5"], tmp_path)
    assert len(re.findall("loss", plain.stdout)) == 5
    command = ScriptCommand.parse([script, "--steps", "5"], cwd=tmp_path)
    assert run_script(command, uniform("fp8"), audit=tmp_path / "audit.json") == 0
    said = capfd.readouterr()
    assert len(re.findall("loss", said.out)) == 5
    assert said.out != plain.stdout
    assert json.loads((tmp_path / "audit.json").read_text())["ok"]
    lines = said.err.splitlines()
    assert [line for line in lines if "emulated on this device" in line] == lines[:1]


#: prints what reaches it; knows nothing of torch, so it starts in a moment
LISTENER = """
import os, signal, sys, time
def told(number, frame):
    print("got", signal.Signals(number).name, flush=True)
    os._exit(40)
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
    signal.signal(number, told)
print(os.getpid(), os.environ["AUTOPREC_TRIAL"], flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGKILL])
def test_the_script_gets_the_signals_and_does_not_outlive_the_command(sent: signal.Signals, tmp_path: Path) -> None:
    script = tmp_path / "listen.py"
    script.write_text(LISTENER)
    argv = [sys.executable, "-c", CODE, "null", "", str(script)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[3]) as process:
        assert process.stdout is not None
        pid, config = process.stdout.readline().split()
        process.send_signal(sent)
        heard = process.stdout.read()
        code = process.wait(30)
    assert heard == f"got {'SIGTERM' if sent is signal.SIGKILL else sent.name}\n"
    assert code == (-9 if sent is signal.SIGKILL else 40)
    deadline = time.monotonic() + 10
    while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not Path(f"/proc/{pid}").exists()
    assert sent is signal.SIGKILL or not Path(config).parent.exists()  # then the next command removes it


#: counts SIGUSR1 and SIGINT, says so, and ends at SIGTERM
COUNTER = """
import os, signal, sys, time
seen = []
def told(number, frame):
    seen.append(number)
    print("got", len(seen), flush=True)
signal.signal(signal.SIGUSR1, told)
signal.signal(signal.SIGINT, told)
signal.signal(signal.SIGTERM, lambda *_: os._exit(len(seen)))
print("ready", flush=True)
while True:
    time.sleep(60)
"""


def test_a_signal_to_the_whole_group_reaches_the_script_once(tmp_path: Path) -> None:
    script = tmp_path / "count.py"
    script.write_text(COUNTER)
    argv = [sys.executable, "-c", CODE, "null", "", str(script)]
    folder = Path(__file__).parents[3]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, cwd=folder, process_group=0) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGUSR1)  # to the command alone: passed on
        assert process.stdout.readline() == "got 1\n"
        os.killpg(process.pid, signal.SIGUSR1)
        assert process.stdout.readline() == "got 2\n"
        time.sleep(0.2)  # time enough for a third
        os.killpg(process.pid, signal.SIGUSR1)
        assert process.stdout.readline() == "got 3\n"
        time.sleep(0.2)
        process.terminate()
        assert process.stdout.read() == ""
        assert process.wait(30) == 3


def test_a_signal_to_the_command_is_passed_on_after_the_terminals_own(tmp_path: Path) -> None:
    script = tmp_path / "count.py"
    script.write_text(COUNTER)
    argv = [sys.executable, "-c", CODE, "null", "", str(script)]
    master, terminal = os.openpty()
    with (
        open(master, "r+b", buffering=0) as screen,
        subprocess.Popen(
            argv,
            stdin=terminal,
            stdout=terminal,
            cwd=Path(__file__).parents[3],
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        ) as process,
    ):
        os.close(terminal)

        def wait_for(text: bytes) -> None:
            seen = b""
            while text not in seen:
                seen += screen.read(100) or b""

        wait_for(b"ready")
        screen.write(b"\x03")  # Ctrl-C: the kernel sends it to the whole group
        wait_for(b"got 1")
        time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        wait_for(b"got 2")
        process.terminate()
        assert process.wait(30) == 2


def test_a_script_that_never_trains_is_told_that_no_policy_ran(tmp_path: Path) -> None:
    script = tmp_path / "nothing.py"
    script.write_text("print('done')")
    done = run(uniform("bf16"), str(tmp_path / "audit.json"), str(script))
    assert (done.returncode, done.stdout) == (0, "done\n")
    assert "no training step was seen" in done.stderr
    assert "audit.json was not written" in done.stderr


def test_a_script_that_was_stopped_before_a_step_is_not_said_to_train_nothing(tmp_path: Path) -> None:
    script = tmp_path / "stopped.py"
    script.write_text("import os, signal\nos.kill(os.getpid(), signal.SIGTERM)")
    done = run(uniform("bf16"), "", str(script))
    assert "killed by SIGTERM before its first training step" in done.stderr
    assert "no training step was seen" not in done.stderr


HELPED = """
import os, pathlib, subprocess, sys, torch
from collections import OrderedDict
from torch import nn
if len(sys.argv) > 1:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
else:
    left = "import time, pathlib; time.sleep(1.5); pathlib.Path('uploaded.txt').touch()"
    helper = subprocess.run([sys.executable, sys.argv[0], "features"])
    assert helper.returncode == 0, helper
    model = nn.Sequential(OrderedDict(core=nn.Linear(4, 4)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(15):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
if len(sys.argv) > 1:
    pathlib.Path("features.txt").touch()
else:
    subprocess.Popen([sys.executable, "-c", left], start_new_session=True)
"""


@pytest.mark.usefixtures("warm")
def test_what_the_script_starts_may_train_another_model_and_outlive_it(tmp_path: Path) -> None:
    """What such a process does with a policy that is for another model is told in tests/trial/inside.

    The script is a fork; what it starts is a new process.
    """
    (tmp_path / "train.py").write_text(HELPED)
    document = uniform("bf16") | {"model": {"class": "Sequential", "parameters": 20}}
    command = ScriptCommand.parse([str(tmp_path / "train.py")], cwd=tmp_path)
    assert run_script(command, document, audit=tmp_path / "audit.json") == 0
    assert (tmp_path / "features.txt").exists()
    assert json.loads((tmp_path / "audit.json").read_text())["ok"]
    for _ in range(100):
        if (tmp_path / "uploaded.txt").exists():
            return
        time.sleep(0.1)
    pytest.fail("what the script had left running was ended")


def test_a_script_that_only_starts_the_training_of_another_model_ends_as_failed(tmp_path: Path) -> None:
    document = uniform("bf16")
    assert _with_notes(0, tmp_path, document, None) == 0, "no step was seen"
    (tmp_path / LEFT).touch()
    assert [_with_notes(code, tmp_path, document, None) for code in (0, 3)] == [1, 3]
    (tmp_path / APPLIED).touch()
    assert _with_notes(0, tmp_path, document, None) == 0
    (tmp_path / REFUSED).touch()
    assert _with_notes(0, tmp_path, document, None) == 1
