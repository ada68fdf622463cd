"""What judging the precision of a script costs: ``autoprec check`` as a whole, and part by part.

    python -m benchmarks.precision.seconds [--command] [SCRIPT [ARGUMENTS ...]]

Without a script: GPT-2 of 124M parameters (:mod:`benchmarks.precision.gpt2`) in bf16 and under autocast. Seconds and
CPU seconds of each part are printed: the script's start, its step recorded as any search does, its step judged (a
search's own look is the difference of the two), each time that the step is played again with lines lifted.
``--command`` runs ``autoprec check`` itself, whose processes are counted together.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from autoprec.graph.recorder import StepRecorder
from autoprec.trial.inside.judging.judge import Judge
from autoprec.trial.inside.judging.lifting import Lift
from autoprec.trial.inside.observe.discovery import Found
from autoprec.trial.inside.observe.hooks import Events, Hooks
from autoprec.trial.protocol import LiftSpec
from benchmarks.precision.running import stopped_at_first_step

GPT2 = Path(__file__).with_name("gpt2.py")
DEFAULT = ((str(GPT2), "bf16", "1", "128"), (str(GPT2), "autocast", "1", "128"))


class Clock:
    """Seconds and CPU seconds of parts of a run, each printed as it ends."""

    def __init__(self) -> None:
        self.parts: dict[str, float] = {}
        self._began = time.monotonic(), time.process_time()

    def part(self, name: str) -> None:
        """End the part that has run since the last one ended."""
        began, now = self._began, (time.monotonic(), time.process_time())
        self._began = now
        self.parts[name] = now[1] - began[1]
        print(f"    {name:45} {now[0] - began[0]:8.1f} s {self.parts[name]:8.1f} CPU s", flush=True)


class _Recorded(Events):
    """Records a step as it is recorded where nothing is judged."""

    def __init__(self, found: Found, hooks: Hooks, done: Callable[[], None]) -> None:
        self._recorder, self._done = StepRecorder(found.root, optimizers=found.optimizers), done
        self._recorder.__enter__()
        hooks.events = self

    def gradients_ready(self, optimizer: Any) -> None:  # noqa: ARG002
        self._recorder.__exit__(None, None, None)
        self._recorder.report()
        self._done()


def parts(script: Sequence[str]) -> dict[str, float]:
    """Print what each part takes in this process; return their CPU seconds."""
    path, arguments, clock = Path(script[0]), script[1:], Clock()

    def recorded(found: Found, hooks: Hooks, end: Callable[[], None]) -> None:
        clock.part("start, to the first step")
        _Recorded(found, hooks, lambda: (clock.part("the step, recorded"), end()))  # type: ignore[func-returns-value]

    def judged(found: Found, hooks: Hooks, end: Callable[[], None]) -> None:
        clock.part("start, again")

        def done(_: Any) -> None:
            clock.part("the step, recorded and judged")
            end()

        Judge(found, hooks, done).start(running=False)

    def lifted(found: Found, hooks: Hooks, end: Callable[[], None]) -> None:
        clock.part("start, once more")
        count = [0]

        def beat() -> None:
            count[0] += 1
            clock.part(f"played {count[0]}")

        def done(answer: Any) -> None:
            clock.part("the rest of lifting")
            print(f"    {answer}")
            end()

        Lift(LiftSpec(), found, hooks, done, beat).start()

    for kind in (recorded, judged, lifted):
        stopped_at_first_step(path, arguments, kind)
        clock.part("the script's end")
    look = clock.parts["the step, recorded and judged"] - clock.parts["the step, recorded"]
    lifting = sum(seconds for name, seconds in clock.parts.items() if name.startswith(("played", "the rest of")))
    print(f"    a search's own look: {look:.1f} CPU s; lines lifted: {lifting:.1f} CPU s")
    return clock.parts


def command(script: Sequence[str]) -> None:
    """Print what ``autoprec check`` takes, all its processes together."""
    with tempfile.TemporaryDirectory() as folder:
        before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
        whole = [str(Path(script[0]).resolve()), *script[1:]]
        done = subprocess.run(
            [sys.executable, "-m", "autoprec", "check", *whole], cwd=folder, capture_output=True, text=True, check=False
        )
        took, after = time.monotonic() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    print(done.stderr + done.stdout)
    print(f"    autoprec check: exit {done.returncode}, {took:.1f} s, {cpu:.1f} CPU s", flush=True)


def main() -> None:
    """Print the table of each script."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--command", action="store_true", help="autoprec check itself")
    parser.add_argument("script", nargs=argparse.REMAINDER)
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    for script in (tuple(asked.script),) if asked.script else DEFAULT:
        print(" ".join((Path(script[0]).name, *script[1:])), flush=True)
        command(script) if asked.command else parts(script)


if __name__ == "__main__":
    main()
