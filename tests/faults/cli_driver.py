"""The command line with a simulated script behind it: ``cli_driver.py DELAY autoprec-arguments...``.

Everything is real but the training: commands, signals, files, exit codes. ``DELAY`` seconds are spent in every trial.
With ``AUTOPREC_TEST_WAITED`` set, the seconds that the search spent in its tracking are written to that file.
"""

from __future__ import annotations

import functools
import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # a process of its own: it finds the tests

from autoprec.cli import cli
from autoprec.cost.device.cpu import UNCALIBRATED, UNMEASURED
from autoprec.tracking.listener import TrackingListener
from autoprec.tuning import engine
from tests.simulated import SimulatedRunner, SimulatedScript, simulated_graph

waited = [0.0]


def timed(method: Any) -> Any:
    """Add up the time that calls of a method take."""

    @functools.wraps(method)
    def call(*values: Any, **named: Any) -> Any:
        began = time.monotonic()
        try:
            return method(*values, **named)
        finally:
            waited[0] += time.monotonic() - began

    return call


def main() -> None:
    Path("train.py").touch()
    script = SimulatedScript(
        graph=simulated_graph(2, width=4096, tokens=16384), device="NVIDIA H100 80GB HBM3", delay_s=float(sys.argv[1])
    )
    engine.runner_factory = lambda *_: lambda seed, _folder: SimulatedRunner(script, seed)
    engine.cpu_rates = lambda: (UNMEASURED, UNCALIBRATED)  # it would time products in a process with PyTorch
    for name in ("started", "trial", "attach", "close"):
        setattr(TrackingListener, name, timed(getattr(TrackingListener, name)))
    try:
        run()
    finally:
        if "AUTOPREC_TEST_WAITED" in os.environ:
            Path(os.environ["AUTOPREC_TEST_WAITED"]).write_text(str(waited[0]))


def run() -> None:
    cli.main([*sys.argv[2:], "--force", "--space", "hopper-fp8", "--steps", "8", "train.py"], prog_name="autoprec")


if __name__ == "__main__":
    main()
