"""The command line with a simulated script behind it: ``cli_driver.py DELAY autoprec-arguments...``.

Everything is real but the training: commands, signals, files, exit codes. ``DELAY`` seconds are spent in every trial.
"""

from __future__ import annotations

import sys
from pathlib import Path

from autoprec.cli import cli
from autoprec.search import engine
from autoprec.testing.simulated import SimulatedRunner, SimulatedScript, simulated_graph


def main() -> None:
    Path("train.py").touch()
    script = SimulatedScript(
        graph=simulated_graph(2, width=4096, tokens=16384), device="NVIDIA H100 80GB HBM3", delay_s=float(sys.argv[1])
    )
    engine.runner_factory = lambda _options, _command: lambda seed, _folder: SimulatedRunner(script, seed)
    cli.main([*sys.argv[2:], "--force", "--space", "hopper-fp8", "--steps", "8", "train.py"], prog_name="autoprec")


if __name__ == "__main__":
    main()
