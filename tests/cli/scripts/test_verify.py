"""``autoprec verify``: what it prints and how it leaves; tests/tuning/test_verify.py has the comparison itself."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from autoprec.cli.scripts.verify import verify
from autoprec.errors import PolicyError
from autoprec.trial.protocol import HostInfo
from autoprec.tuning.decide.decision import Rules
from autoprec.tuning.decide.sentences import Reason
from autoprec.tuning.study.run import Run, metrics_of
from autoprec.tuning.verify import Verification, judge


@pytest.fixture
def verified(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Return a function that runs the command over a verification that ended as given."""

    class Pool:
        def __init__(self, *_: Any) -> None: ...
        def __enter__(self) -> Pool:
            return self

        def __exit__(self, *_: object) -> None: ...
        def info(self, seed: int = 0) -> HostInfo:
            return HostInfo("fork", {}, (), (), "cpu")

    def run(verdict: str, *words: str) -> Any:
        def done(_pool: Any, asked: Any, policies: dict[str, Any], _folder: Path, **options: Any) -> Verification:
            options["tell"]("seed 0: measured")
            values = {"speedup": 1.5, "divergence": 0.001, "memory_bytes": 2**30, "step_time_ms": 5.0}
            runs = [Run(0, "finalist", "", {}, {}, "ok", metrics=metrics_of(values), seed=seed) for seed in (0, 1)]
            rows = tuple(judge(Rules(), name, [replace(run, name=name) for run in runs]) for name in policies)
            why = Reason("cost_model", {"text": "why it is so"})
            return Verification(
                verdict, why, rows, asked.seeds, asked.steps, 0.0004, options["timed"], options["first_seed"]
            )

        monkeypatch.setattr("autoprec.tuning.verify.setup_of", lambda _policy, _pool, options: options)
        monkeypatch.setattr("autoprec.tuning.verify.contenders", lambda policy, *_: {"policy": policy.to_dict()})
        monkeypatch.setattr("autoprec.tuning.verify.verify", done)
        monkeypatch.setattr("autoprec.cli.scripts.verify.HostPool", Pool)
        (tmp_path / "train.py").touch()
        (tmp_path / "p.yaml").write_text("schema: autoprec.policy/1\nrecipes: {bf16: {format: bf16}}\ndefault: bf16\n")
        line = ["--policy", f"{tmp_path}/p.yaml", *words, f"{tmp_path}/train.py"]
        return CliRunner().invoke(verify, line, standalone_mode=False)

    return run


def test_what_holds_is_exit_0_and_each_seed_is_told(verified: Any) -> None:
    found = verified("holds", "--seeds", "2")
    assert found.return_value == 0, found.exception
    assert "holds: why it is so" in found.stdout
    assert "1.50x" in found.stdout
    assert "running train.py to its first training step" in found.stderr
    assert "seed 0: measured" in found.stderr


def test_what_does_not_hold_is_exit_1(verified: Any) -> None:
    assert "does not hold: why it is so" in verified("fails").stdout
    found = verified("fails", "--json")
    assert found.return_value == 1
    assert json.loads(found.stdout)["ok"] is False


def test_what_its_seeds_cannot_tell_is_exit_3(verified: Any) -> None:
    found = verified("undecided")
    assert found.return_value == 3
    assert "undecided: why it is so" in found.stdout


def test_a_policy_that_is_not_there_is_refused_before_the_script_starts(tmp_path: Path) -> None:
    found = CliRunner().invoke(verify, ["--policy", str(tmp_path / "none.yaml"), "train.py"])
    assert isinstance(found.exception, PolicyError)
