"""The room's public names are there without MLflow being imported before it is needed."""

from __future__ import annotations

import subprocess
import sys

import pytest

from autoprec import tracking


def test_every_public_name_can_be_had() -> None:
    from autoprec.tracking.log import Logged, log_study

    assert {name: getattr(tracking, name) for name in tracking.__all__} == {"Logged": Logged, "log_study": log_study}


def test_another_name_is_not_there() -> None:
    with pytest.raises(AttributeError, match=r"autoprec\.tracking.*Wandb"):
        _ = tracking.Wandb


def test_a_search_imports_neither_mlflow_nor_torch_to_track() -> None:
    code = (
        "import sys; from autoprec.tracking import log_study; from autoprec.tracking.beside import TrackingListener;"
        "print({'mlflow', 'torch'} & sys.modules.keys())"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"
