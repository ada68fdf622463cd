"""NumPy is loaded with one thread, and nobody else is told so."""

from __future__ import annotations

import os
import subprocess
import sys


def test_the_variable_that_openblas_reads_is_afterwards_as_it_was() -> None:
    code = (
        "import os\nfrom autoprec.support.arrays import np, npt\n"
        "print(len(os.listdir('/proc/self/task')), os.environ['OPENBLAS_NUM_THREADS'], np.ones(2).sum())"
    )
    environment = os.environ | {"OPENBLAS_NUM_THREADS": "7"}
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert found.stdout.split() == ["1", "7", "2.0"]
