"""The driver never imports torch: everything that touches the user's model lives in a child process."""

import subprocess
import sys
from pathlib import Path

import pytest

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
    "autoprec.tuning.decide.solver",
    "autoprec.tuning.decide.sampler.sampler",
    "autoprec.tuning.engine",
    "autoprec.tracking",
    "autoprec.report",
    "autoprec.cli.scripts.search",
]


@pytest.mark.parametrize("module", DRIVER)
def test_importing_a_part_of_the_driver_imports_no_torch(module: str) -> None:
    code = f"import sys, {module}; print([n for n in ('torch', 'mlflow') if n in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert found.stdout.strip() == "[]"
