"""NumPy, loaded so that its linear algebra has one thread: ``from autoprec.support.arrays import np``.

The driver's small matrices are no faster on several cores, whose spinning threads would disturb timed trials. OpenBLAS
reads the variable once, when it is loaded: scripts that are started later see it as it was. What only reads options,
policies and records does not import this: NumPy is a quarter of what a command takes to start.
"""

from __future__ import annotations

import os

_before = os.environ.get("OPENBLAS_NUM_THREADS")
os.environ["OPENBLAS_NUM_THREADS"] = "1"
import numpy as np  # noqa: E402
import numpy.typing as npt  # noqa: E402

if _before is None:
    del os.environ["OPENBLAS_NUM_THREADS"]
else:
    os.environ["OPENBLAS_NUM_THREADS"] = _before

__all__ = ["np", "npt"]
