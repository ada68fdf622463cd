"""The driver never imports torch: everything that touches the user's model lives in a child process."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DRIVER = [
    "autoprec.policy",
    "autoprec.policy.space",
    "autoprec.precision.hardware",
    "autoprec.graph.report",
    "autoprec.cost",
    "autoprec.trial.command",
    "autoprec.trial.inside.observe.conditions",
    "autoprec.trial.protocol",
    "autoprec.trial.driver.runner",
    "autoprec.trial.driver.script",
    "autoprec.tuning.study.records",
    "autoprec.tuning.decide.problem",
    "autoprec.policy.solver",
    "autoprec.tuning.decide.sampler.sampler",
    "autoprec.tuning.engine",
    "autoprec.tracking",
    "autoprec.reports",
    "autoprec.cli.scripts.search",
]


def test_importing_a_part_of_the_driver_imports_no_torch_and_starts_no_thread() -> None:
    """One process imports the parts one after the other, the lightest first, and tells of the first that is heavy.

    Threads of OpenBLAS, which start where it is loaded, would disturb trials that are timed.
    """
    code = (
        "import importlib, os, sys\n"
        f"for name in {DRIVER!r}:\n"
        "    importlib.import_module(name)\n"
        "    heavy = [n for n in ('torch', 'mlflow') if n in sys.modules]\n"
        "    if heavy: sys.exit(f'{name} imports {heavy}')\n"
        "    if len(os.listdir('/proc/self/task')) > 1: sys.exit(f'{name} starts threads')\n"
        "if 'OPENBLAS_NUM_THREADS' in os.environ: sys.exit('scripts would have one thread as well')"
    )
    usual = {name: value for name, value in os.environ.items() if not name.endswith("_NUM_THREADS")}
    line = [sys.executable, "-c", code]
    found = subprocess.run(line, capture_output=True, text=True, cwd=ROOT, env=usual, check=False)
    assert found.returncode == 0, found.stderr
