"""The environment of a trial."""

from __future__ import annotations

from pathlib import Path

from autoprec.trial.environment import CONFIG_VARIABLE, INJECT, run_environment, trial_environment


def test_hooks_come_first_and_the_users_path_stays(tmp_path: Path) -> None:
    env = run_environment(tmp_path / "c.json", "mark", {"PYTHONPATH": f"/a:{INJECT}:/b", "OMP_NUM_THREADS": "7"})
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
