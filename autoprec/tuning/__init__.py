"""The search: what is asked of trials, what follows from them, and what is kept of it.

``engine`` calls the ``phases`` in order; ``decide`` is the arithmetic on what they measured; ``study`` is what lies on
disk, ``workers`` where trials run. ``verify`` judges one policy by the same rules, ``transfer`` carries one over to a
bigger model, ``lint`` finds what is wrong with one without training.
"""

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
