"""Compiled libraries that a kill has cut off: torch's cache hands them out until somebody removes them.

The linker of ``torch.compile`` writes a library where it is looked for. One that is killed while it writes leaves the
beginning of a file, and from then on neither the search nor the script itself runs (torch 2.13).
"""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

#: How often a trial is run again for such files: a kill cuts off as many as were compiled at once.
MOST_TORN = 8
_SAID = re.compile(r"(/[^\n:]+\.so): (?:file too short|invalid ELF header|cannot read file data)")


def remove_torn(said: str) -> bool:
    """Remove the libraries of torch's cache that could not be loaded because they are cut off.

    Args:
        said: what a process of the script said.

    Returns:
        Whether there were any, so that what failed may now compile them and run.
    """
    removed = False
    for path in {Path(found) for found in _SAID.findall(said)}:
        # ab/cabc...xyz.main.so, as torch lays them out: no library of anybody else is touched
        if path.parent.name == path.name[1:3] and path.name.startswith("c"):
            with contextlib.suppress(OSError):
                path.unlink()
                removed = True
    return removed
