"""From how a process ended to a status and one sentence for a person."""

from __future__ import annotations

import os
import re
import signal
import sysconfig
from dataclasses import replace
from pathlib import Path

from autoprec.trial.protocol import OUT_OF_TIME, TrialResult

#: Lines of a script's output in a message: a traceback of a few frames, and what it says, on one screen.
TAIL_LINES = 25


def last_lines(text: str, limit: int = TAIL_LINES) -> str:
    """Return the last ``limit`` lines, each cut at 400 characters."""
    lines = [line.rpartition("\r")[2][:400] for line in text.rstrip().splitlines()]
    return "\n".join(lines[-limit:])


def is_own_fault(tail: str) -> bool:
    """Say whether a traceback ends in AutoPrec's own code rather than in the script or a library it called.

    Frames of Python's standard library are passed over: who called them is to blame. So are those in which a trial's
    own ``open`` or ``mkdir`` passes on what the system's says.
    """
    found = re.findall(r'^  File "([^"]+)", line \d+.*\n(    .*)?', tail + "\n", flags=re.MULTILINE)
    passes_on = re.compile(r"\boriginal\(|^\s*raise (File|Is|Not|Permission|OS)\w*Error|^\s*raise OSError")
    frames: list[str] = [file for file, line in found if not ("/inside/isolate/" in file and passes_on.search(line))]
    library = sysconfig.get_paths()["stdlib"] + os.sep
    ours = str(Path(__file__).resolve().parents[2]) + os.sep
    for frame in reversed(frames):
        if frame.startswith("<") or (frame.startswith(library) and "site-packages" not in frame):
            continue
        return frame.startswith(ours)
    return False


def describe_exit(code: int) -> str:
    """Say how a process ended: ``code`` as subprocess has it (negative for a signal)."""
    if code < 0:
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        return f"was killed by {name}"
    return f"ended with exit code {code}"


def classify(result: TrialResult | None, code: int, *, timed_out: bool, timeout_s: float, tail: str) -> TrialResult:
    """Return the final result of a trial.

    Args:
        result: what the trial wrote itself, if it came that far; it wins, because it knows best.
        code: exit code, negative for a signal.
        timed_out: the deadline passed and we ended it.
        timeout_s: that deadline, in seconds of the trial's own time since its last step, for the message.
        tail: the last output.
    """
    if result is not None:
        return result if result.status in ("ok", "pruned", OUT_OF_TIME) else replace(result, tail=last_lines(tail))
    shown = last_lines(tail)
    if timed_out:
        return TrialResult(
            "hung",
            f"no step and no result within {round(timeout_s, 1):g} s (waiting for a CPU not counted): it was ended",
            tail=shown,
        )
    lowered = tail.lower()
    if "out of memory" in lowered or "can't allocate memory" in lowered or "memoryerror" in lowered:
        return TrialResult("oom", f"out of memory ({describe_exit(code)})", tail=shown)
    if code == -signal.SIGKILL or "Signal 9 (SIGKILL) received" in tail:  # of a rank, as torchrun puts it
        return TrialResult("oom", "killed by SIGKILL: most likely the kernel's out-of-memory killer", tail=shown)
    if code == 0:
        return TrialResult("too_short", "the script ended before the asked number of steps", tail=shown)
    return TrialResult("crashed", f"the trial {describe_exit(code)}", tail=shown)
