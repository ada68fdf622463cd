"""The room is imported without MLflow."""

from __future__ import annotations

import subprocess
import sys


def test_a_search_imports_neither_mlflow_nor_torch_to_track() -> None:
    code = (
        "import sys; from autoprec.tracking.listener import TrackingListener;"
        "print({'mlflow', 'torch'} & sys.modules.keys())"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"
