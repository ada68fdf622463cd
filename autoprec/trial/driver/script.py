"""``autoprec run``: the script as it is, to its own end, under a policy."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from autoprec.policy import Policy, boundaries
from autoprec.support.plain import Document
from autoprec.trial.command import ScriptCommand
from autoprec.trial.driver.classify import describe_exit
from autoprec.trial.environment import run_environment
from autoprec.trial.processes import die_with_parent, scratch

#: What a job scheduler, a shell or a person sends to the command is meant for the script.
_MEANT_FOR_THE_SCRIPT = frozenset(
    {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2}
)
#: Within this many seconds a signal to a group has reached all of it.
_DELIVERY_S = 0.01
_AWAITED = _MEANT_FOR_THE_SCRIPT | {signal.SIGCHLD}


@contextlib.contextmanager
def _held_back() -> Iterator[set[signal.Signals] | None]:
    """Block those signals while the script runs; gives the mask before, None where signals are not ours to block."""
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "sigtimedwait"):
        yield None
        return
    before = {signal.Signals(s) for s in signal.pthread_sigmask(signal.SIG_BLOCK, _AWAITED)}
    try:
        yield before
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _GroupMember:
    """One more process of this process group, which keeps what it is sent pending and does nothing else.

    ``kill -- -PGID``, ``timeout`` and job schedulers signal the whole group, so the script has such a signal already. A
    second one would end a script that is writing its checkpoint because of the first. What is pending here went to all.
    """

    def __init__(self) -> None:
        self._pid = os.fork()
        while self._pid == 0:  # it inherits the mask of :func:`_held_back`
            die_with_parent()
            signal.pause()

    def has(self, number: int) -> bool:
        """Whether it was sent this signal, too."""
        time.sleep(_DELIVERY_S)
        with contextlib.suppress(OSError):
            _, _, rest = (
                Path(f"/proc/{self._pid}/status").read_text(encoding="ascii", errors="replace").partition("ShdPnd:")
            )
            return bool(int(rest.split()[0], 16) >> (number - 1) & 1)
        return False

    def end(self) -> None:
        with contextlib.suppress(OSError):
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)


def _wait(process: subprocess.Popen[bytes]) -> int:
    """Wait for the script, and pass on every signal that this process alone was sent.

    What the terminal sends (Ctrl-C, its end) comes from the kernel, to the whole foreground group: the script has it.
    """
    member = _GroupMember()
    try:
        while process.poll() is None:
            sent = signal.sigtimedwait(_AWAITED, 1.0)
            if sent is None or sent.si_signo not in _MEANT_FOR_THE_SCRIPT:
                continue
            if sent.si_code <= 0 and not member.has(sent.si_signo):
                process.send_signal(sent.si_signo)
                continue
            signal.sigtimedwait({sent.si_signo}, 0)  # ``timeout`` signals its child, and then the group of both
            member.end()  # a fresh one has nothing pending
            member = _GroupMember()
    finally:
        member.end()
    return process.returncode


def run_script(
    command: ScriptCommand,
    policy: Policy | Document | None = None,
    backend: str = "auto",
    audit: Path | str | bool = False,
    run_steps: int | None = None,
) -> int:
    """Run a script in its own process, with its own input, output, files and environment; returns its exit code.

    The policy is applied inside the first training forward of every model that is trained (of one class), in every
    rank; after that no hook is left in a step, so it costs what it did. A policy that does not fit ends the script
    there with exit code 1 and the reason; a process that the script starts may train a model that the policy is not
    for. What the script leaves running goes on. The script gets the signals this process gets, and SIGTERM when it is
    killed.

    Args:
        command: what to run.
        policy: the policy or its document; None (or one that keeps everything) changes no bit of the training.
        backend: which backend runs the GEMMs.
        audit: where to write the audit (asked against executed, JSON) when the script ends; True for ``audit.json``
            beside the script's working directory; False for none.
        run_steps: optimizer steps of the whole run, for phases that begin at a share of it.

    Raises:
        UsageError: such a phase, and no ``run_steps``.
    """
    if isinstance(policy, Policy):
        boundaries(policy, run_steps)
    document = policy.to_dict() if isinstance(policy, Policy) else policy
    target = command.cwd / "audit.json" if audit is True else (Path(audit).absolute() if audit else None)
    settings: Document = {
        "run_steps": run_steps,
        "mode": "run",
        "single": command.single,
        "policy": document,
        "backend": backend,
        "audit": str(target) if target else "",
    }
    with scratch() as private, _held_back() as mask:
        config = private / "run.json"
        config.write_text(json.dumps(settings), encoding="utf-8")

        def begin() -> None:  # in the script's process, before its program
            die_with_parent(signal.SIGTERM)
            signal.pthread_sigmask(signal.SIG_SETMASK, mask or ())

        process = subprocess.Popen(
            command.argv(),
            env=run_environment(config),
            cwd=command.cwd,
            preexec_fn=begin if mask is not None else None,
        )
        code = process.wait() if mask is None else _wait(process)
        return _with_notes(code, private, document, target)


def _with_notes(code: int, private: Path, document: Document | None, audit: Path | None) -> int:
    """Return the exit code, after saying what became of the policy where the script could not."""
    if (private / "refused").exists():
        return code or 1  # the script went on although it was refused
    if document is None or (private / "applied").exists():
        return code
    if (private / "left").exists():
        print("autoprec: nothing ran under the policy: what the script trained is another model", file=sys.stderr)
        return code or 1
    ended = f"the script {describe_exit(code)} before its first training step"
    seen = ended if code else "no training step was seen"
    lines = [f"note: {seen}, so nothing ran under the policy"]
    if audit is not None:
        lines.append(f"note: {audit} was not written: there is nothing to audit")
    print(*(f"autoprec: {line}" for line in lines), sep="\n", file=sys.stderr)
    return code
