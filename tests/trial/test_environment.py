"""The environment of a trial."""

from __future__ import annotations

from pathlib import Path

import pytest

from autoprec.precision.hardware import cores
from autoprec.trial.environment import (
    CONFIG_VARIABLE,
    INJECT,
    own_threads,
    run_environment,
    thread_count,
    trial_environment,
)


def test_hooks_come_first_and_the_users_path_stays(tmp_path: Path) -> None:
    env = run_environment(tmp_path / "c.json", {"PYTHONPATH": f"/a:{INJECT}:/b", "OMP_NUM_THREADS": "7"})
    assert env["PYTHONPATH"] == f"{INJECT}:/a:/b"
    assert env[CONFIG_VARIABLE] == str(tmp_path / "c.json")
    assert env["OMP_NUM_THREADS"] == "7"  # `autoprec run` changes nothing else
    assert "WANDB_MODE" not in env


def test_a_trial_is_quiet_and_uploads_nothing(tmp_path: Path) -> None:
    base = {"MLFLOW_TRACKING_URI": "http://users.server", "MLFLOW_RUN_ID": "1", "KEEP": "x"}
    env = trial_environment(tmp_path / "c.json", "mark", tmp_path, threads=2, base=base)
    assert env["OMP_NUM_THREADS"] == "2"
    assert env["OMP_WAIT_POLICY"] == "PASSIVE"
    assert env["WANDB_MODE"] == "disabled"
    assert env["MLFLOW_TRACKING_URI"].startswith(tmp_path.as_uri())
    assert "MLFLOW_RUN_ID" not in env
    assert env["KEEP"] == "x"


def test_a_trial_on_a_gpu_keeps_the_users_threads(tmp_path: Path) -> None:
    base = {"OMP_NUM_THREADS": "12", "TOKENIZERS_PARALLELISM": "true", "OMP_WAIT_POLICY": "ACTIVE"}
    env = trial_environment(tmp_path / "c.json", "mark", tmp_path, threads=0, base=base)
    assert {name: env[name] for name in base} == base
    plain = trial_environment(tmp_path / "c.json", "mark", tmp_path, threads=0, base={})
    assert "OMP_NUM_THREADS" not in plain
    assert "TOKENIZERS_PARALLELISM" not in plain
    assert plain["WANDB_MODE"] == "disabled"
    copied = own_threads({"MKL_NUM_THREADS": "3"})
    assert int(copied["OMP_NUM_THREADS"]) >= 1
    assert copied["MKL_NUM_THREADS"] == "3"
    assert own_threads(base)["TOKENIZERS_PARALLELISM"] == "true"


@pytest.mark.parametrize(
    ("given", "count"), [("3", 3), ("4,2", 4), (" 2 ", 2), ("0", 1), ("many", cores()), (None, cores())]
)
def test_threads_of_the_users_own_process(given: str | None, count: int) -> None:
    assert thread_count({} if given is None else {"OMP_NUM_THREADS": given}) == count
