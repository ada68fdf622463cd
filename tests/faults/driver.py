"""A search over the simulated script, as a process that can be killed: ``driver.py STUDY TRIALS DELAY [resume]``."""

from __future__ import annotations

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # a process of its own: it finds the tests

from autoprec.trial.command import ScriptCommand
from autoprec.tuning.engine import Search
from autoprec.tuning.events import Listeners
from autoprec.tuning.options import SearchOptions
from tests.simulated import SimulatedRunner, SimulatedScript, simulated_graph


class Told:
    """Prints every finished trial, so that the test knows what was completed when the process died."""

    def phase(self, name: str, detail: str = "") -> None:
        print(f"phase {name}\ncpu {name} {time.process_time():.3f}", flush=True)

    def started(self, info: object) -> None:
        """Nothing to show."""

    def trial(self, record: object, *_: object) -> None:
        print(f"trial {record.kind} {record.name} {record.seed}", flush=True)  # type: ignore[attr-defined]

    def note(self, text: str) -> None:
        """Nothing to show."""

    def finished(self, result: object) -> None:
        print("finished", flush=True)


def main() -> None:
    print(f"begun\ncpu begun {time.process_time():.3f}", flush=True)
    study, trials, delay = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
    Path("train.py").touch()
    options = SearchOptions(
        command=("train.py",), study=study, trials=trials, steps=8, space="hopper-fp8", force=True,
        resume="resume" in sys.argv, output=f"{study}.yaml",
    )  # fmt: skip
    script = SimulatedScript(
        graph=simulated_graph(2, width=4096, tokens=16384), device="NVIDIA H100 80GB HBM3", delay_s=delay
    )
    listeners = Listeners(Told())  # type: ignore[arg-type]
    Search(
        options, ScriptCommand.parse(options.command), listeners, lambda seed, _: SimulatedRunner(script, seed)
    ).run()


if __name__ == "__main__":
    main()
