from __future__ import annotations

from pathlib import Path

from autoprec.policy import Policy
from autoprec.recipes import BUILTIN_RECIPES
from autoprec.search.hosts import HostPool
from autoprec.search.verify import Verification, contenders, verify
from autoprec.testing.simulated import SimulatedRunner, SimulatedScript
from autoprec.trial.protocol import TrialSpec


def check(policy: Policy, tmp_path: Path, *, timed: bool = True, script: SimulatedScript | None = None) -> Verification:
    simulated = script or SimulatedScript()
    with HostPool(lambda seed, _folder: SimulatedRunner(simulated, seed), tmp_path) as pool:
        spec = TrialSpec(steps=8)
        return verify(pool, contenders(policy), spec, seeds=3, timed=timed, max_divergence=0.0025, tell=lambda _: None)


def uniform(name: str) -> Policy:
    return Policy(recipes={name: BUILTIN_RECIPES[name]}, default=name)


def test_a_good_policy_holds_over_every_seed(tmp_path: Path) -> None:
    result = check(uniform("fp8_rowwise"), tmp_path)
    assert result.ok
    assert len(result.rows[0].speedups) == 3
    assert {row.name for row in result.rows} == {"policy", "bf16 autocast", "all bf16", "all fp8_rowwise"}
    assert result.to_json()["rows"][0]["speedup"] == result.rows[0].speedup


def test_a_policy_that_a_preset_beats_does_not_hold_and_names_it(tmp_path: Path) -> None:
    slow = Policy(recipes={"bf16": BUILTIN_RECIPES["bf16"]}, layers=({"match": "head", "recipe": "bf16"},))  # type: ignore[arg-type]
    result = check(slow, tmp_path)
    assert not result.ok
    assert "bf16 autocast" in result.reason or "all bf16" in result.reason


def test_a_policy_that_diverges_does_not_hold(tmp_path: Path) -> None:
    result = check(uniform("nvfp4_plain"), tmp_path, script=SimulatedScript(head_factor=40.0))
    assert not result.ok
    assert "divergence" in result.reason


def test_emulated_numerics_are_never_judged_by_speed(tmp_path: Path) -> None:
    slow = Policy(recipes={"bf16": BUILTIN_RECIPES["bf16"]}, layers=({"match": "head", "recipe": "bf16"},))  # type: ignore[arg-type]
    result = check(slow, tmp_path, timed=False)
    assert result.ok
    assert "speed not judged" in result.reason
