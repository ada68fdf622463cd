"""Sensitivity, groups, solver, sampler, Optuna study, finalists, Pareto front, verdict."""

import os
import sys

if "numpy" not in sys.modules:
    # The driver's small matrices are no faster on several cores, whose spinning threads would disturb timed trials.
    # The library reads this once, when it is loaded: scripts that are started later see the variable as it was.
    _before = os.environ.get("OPENBLAS_NUM_THREADS")
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    import numpy  # noqa: F401 - for its own effect

    if _before is None:
        del os.environ["OPENBLAS_NUM_THREADS"]
    else:
        os.environ["OPENBLAS_NUM_THREADS"] = _before
