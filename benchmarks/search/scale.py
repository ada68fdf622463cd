"""A thousand trials over five hundred groups, through the real study code with a simulated script.

    python benchmarks/search/scale.py [--groups 500] [--trials 1000] [--out FILE]

Prints the driver's CPU time per trial (first and last tenth), its memory, and checks that every trial is unique. The
script is simulated (no training, no model), the sampler, the solver, the study's storage and all bookkeeping are real.
"""

from __future__ import annotations

import argparse
import math
import os
import resource
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from autoprec.trial.command import ScriptCommand  # noqa: E402
from autoprec.trial.protocol import TrialResult, TrialSpec  # noqa: E402  # noqa: E402
from autoprec.tuning.engine import Search  # noqa: E402
from autoprec.tuning.events import Listeners  # noqa: E402
from autoprec.tuning.options import SearchOptions  # noqa: E402
from autoprec.tuning.study.run import Run  # noqa: E402
from tests.simulated import SimulatedRunner, SimulatedScript, simulated_graph  # noqa: E402


class Played(SimulatedRunner):
    """Counts the CPU time that the simulated script itself takes: that would be the trial's, not the driver's."""

    seconds = 0.0
    _guard = threading.Lock()

    def run(self, spec: TrialSpec) -> TrialResult:
        before = time.thread_time()
        result = super().run(spec)
        with Played._guard:
            Played.seconds += time.thread_time() - before
        return result


class Clock:
    """Notes the driver's CPU time at every finished trial."""

    def __init__(self) -> None:
        self.marks: list[float] = []
        self.keys: list[str] = []

    def phase(self, name: str, detail: str = "") -> None:
        print(f"    {name} {detail}", file=sys.stderr)

    def started(self, info: object) -> None:
        """Nothing to note."""

    def note(self, text: str) -> None:
        print(f"    {text}", file=sys.stderr)

    def trial(self, record: Run, *_: object) -> None:
        if record.kind in ("preset", "search"):
            self.marks.append(time.process_time() - Played.seconds)
            self.keys.append(repr(sorted(record.params.items())))

    def finished(self, result: object) -> None:
        """Nothing to note."""


def main() -> None:
    parser = argparse.ArgumentParser(description="driver cost at scale")
    parser.add_argument("--groups", type=int, default=500)
    parser.add_argument("--trials", type=int, default=1000)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--folder", type=Path, help="keep the study here, and continue one that is here")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    blocks = max(1, (arguments.groups - 1) // 4)
    with tempfile.TemporaryDirectory() as scratch:
        folder = (arguments.folder or Path(scratch)).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        os.chdir(folder)
        Path("train.py").touch()
        script = SimulatedScript(
            graph=simulated_graph(blocks, width=4096, tokens=16384),
            device="NVIDIA H100 80GB HBM3",
            error_scale=math.sqrt(9 / (4 * blocks + 1)),
        )
        options = SearchOptions(
            command=("train.py",),
            study="scale",
            resume=Path("autoprec-runs/scale/study.db").exists(),
            trials=arguments.trials,
            workers=arguments.workers,
            steps=8,
            seeds=2,
            space="hopper-fp8",
            force=True,
        )
        clock = Clock()
        search = Search(
            options,
            ScriptCommand.parse(options.command),
            Listeners(clock),
            lambda seed, _: Played(script, seed),
        )
        search.run()
        os.chdir(ROOT)
    each = [1000 * (b - a) for a, b in zip(clock.marks, clock.marks[1:], strict=False)]
    tenth = max(1, len(each) // 10)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    last = statistics.median(each[-tenth:])
    rows = [
        ("trials run, different ones", str(arguments.trials), f"{len(clock.keys)}, {len(set(clock.keys))}"),
        ("driver CPU per trial, first tenth (median)", "", f"{statistics.median(each[:tenth]):.0f} ms"),
        ("driver CPU per trial, last tenth (median)", "<= 150 ms", f"{last:.0f} ms"),
        (
            "driver CPU per trial, last tenth (mean, refits of the models included)",
            "",
            f"{statistics.fmean(each[-tenth:]):.0f} ms",
        ),
        ("driver memory, peak", "<= 1 GB", f"{memory:.2f} GB"),
    ]
    lines = [f"| {4 * blocks + 1} groups, hopper-fp8 | goal | measured |", "|---|---|---|"]
    lines += [f"| {what} | {goal} | {got} |" for what, goal, got in rows]
    print("\n".join(lines))
    if arguments.out:
        words = f"python benchmarks/search/scale.py --groups {arguments.groups} --trials {arguments.trials}"
        arguments.out.write_text("\n".join([f"`{words}`", "", *lines, ""]))


if __name__ == "__main__":
    main()
