"""The search that ready.py plans: 30 trials of a compiled gpt2-124M on one H100, by the schedule of a search."""

from __future__ import annotations

import contextlib
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
#: What the planned search compiles: the script as written, and one recipe for every trial.
PLANNED = ("bf16", "fp8_rowwise")
TOKENS = 16384
#: Seconds that the start of CUDA adds to a process, guessed; Triton's for a kernel, one core, which is compiled for an
#: H100 here and not run (a fused norm and a GELU with its bias in blocks of 256 to 2048: 0.08 to 0.14 s, and the first
#: of a process 0.5 s; AMD EPYC, triton of torch 2.11 and 2.13).
CUDA_S, TRITON_S = 2.5, 0.1


def planned(compiled_s: dict[str, tuple[float, float, float]], setup_s: float, start_s: float) -> list[str]:
    """Return table rows: seconds of a 30-trial search of gpt2-124M on one H100, by the schedule of a search.

    Args:
        compiled_s: CPU seconds here, by recipe: the first compilation of one block of this file (half a block of the
            model), one more, and every one more in the same graph; Triton's are in the first.
        setup_s, start_s: seconds here until its script is at its first step, started anew, and as a trial.
    """
    from autoprec.cost import CostModel
    from autoprec.cost.transformer import PRESETS, decoder_report
    from autoprec.precision.hardware import TARGETS
    from autoprec.tuning.options import SearchOptions
    from autoprec.tuning.schedule import Pace, schedule

    report = decoder_report(PRESETS["gpt2"], batch=TOKENS // 1024, seq=1024)
    step = CostModel(report, TARGETS["h100"], compiled=True).estimate({}, activations="bf16")
    step_s = step.time_ms / 1e3
    start_s, setup_s = start_s + CUDA_S, setup_s + CUDA_S
    paces = [
        Pace(start_s + max(0.0, first - again), step_s, 24 * each, blocks=12)
        for first, again, each in (compiled_s[recipe] for recipe in PLANNED)
    ]
    asked = SearchOptions(command=("train.py",))
    both = ((True, "as searches usually end"), (False, "upper bound: nothing converges"))
    rows = []
    for usual, what in both:
        found = schedule(asked, *paces, setup_s=setup_s, host_s=start_s, usual=usual)
        counted = (
            f"{found.total_s:.0f} s: {found.trials} trials {found.trials_s:.0f}, {found.runs} further runs "
            f"{found.finalists_s:.0f}, {found.whole} of the whole model {found.whole_s:.0f}, "
            f"reference {found.reference_s:.0f}, gradient errors {found.scan_s:.0f}"
        )
        rows.append(f"| planned search, --trials 30, compiled gpt2-124M | h100 | {what} (modelled) | {counted} |")
    started = f"started anew {setup_s:.1f} s, a trial {start_s:.1f} s"
    rows.append(f"| gpt2-124M's script at its first step | - | {CUDA_S:g} s of it guessed: CUDA's start | {started} |")
    return rows


def start_seconds() -> tuple[float, float]:
    """Return the seconds until gpt2-124M's script is at its first step: started anew, and as trials start on a GPU.

    Those are forks of a copy that has its imports done (:mod:`autoprec.trial.inside.zygote`), the least of six. What
    the process waited for a core of this machine is taken off.
    """
    from autoprec.trial.command import ScriptCommand
    from autoprec.trial.driver.runner import TrialRunner

    script = ROOT / "benchmarks" / "gpu" / "train_transformer.py"
    command = ScriptCommand.parse([str(script), "--model", "gpt2-124m", "--device", "cpu"])
    seconds = []
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        for seed in range(7):  # the first leaves the copy behind
            runner = stack.enter_context(TrialRunner(command, run_dir=Path(folder), seed_offset=seed, launch="zygote"))
            with _waited(runner) as waited:
                setup_s = runner.start().setup_s
                seconds.append(setup_s - waited(setup_s))
    return seconds[0], min(seconds[1:])


@contextlib.contextmanager
def _waited(runner: Any) -> Iterator[Callable[[float], float]]:
    """Give what tells how many of its first seconds a runner's host waited for a core."""
    from autoprec.trial.progress import tree_usage

    found, began, ended = [(0.0, 0.0)], time.monotonic(), threading.Event()

    def look() -> None:
        while not ended.wait(0.05):
            usage = tree_usage(runner.host_pid).get(runner.host_pid) if runner.host_pid else None
            if usage is not None and usage.waited_s:
                found.append((time.monotonic() - began, usage.waited_s))

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield lambda first_s: max(waited for at_s, waited in found if at_s <= first_s)
    finally:
        ended.set()
        thread.join()
