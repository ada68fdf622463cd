"""``python -m autoprec.tracking STUDY_DIR EXPERIMENT PARENT_PID``: the background process of :mod:`.drain`.

The address of the store comes from the environment (``AUTOPREC_TRACKING_STORE``), because it may carry a login and
command lines are visible to other users.
"""

from __future__ import annotations

import contextlib
import os
import sys

from autoprec.tracking.drain import ENVIRONMENT, drain_until_end
from autoprec.tracking.spool import Spool


def main(arguments: list[str]) -> int:
    """Drain one study until its search has ended."""
    study_dir, experiment, parent = arguments
    uri = os.environ.pop("AUTOPREC_TRACKING_STORE")
    os.environ.update(ENVIRONMENT)
    with contextlib.suppress(OSError):
        os.nice(5)  # the trials are being timed on the same cores
    return drain_until_end(Spool.of(study_dir), uri, experiment, int(parent))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
