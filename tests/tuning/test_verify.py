from __future__ import annotations

from pathlib import Path

from autoprec.policy import Policy
from autoprec.precision.recipes import BUILTIN_RECIPES
from autoprec.trial.protocol import TrialSpec
from autoprec.tuning.verify import Contender, Verification, _judge, contenders, verify
from autoprec.tuning.workers.local import HostPool
from tests.simulated import SimulatedRunner, SimulatedScript


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


def contender(name: str, *speedups: float, memory: int = 100) -> Contender:
    return Contender(name, speedups, (0.0001,) * len(speedups), memory, 1.0, ())


def test_a_policy_that_is_slower_than_the_script_and_saves_nothing_does_not_hold() -> None:
    ok, reason = _judge([contender("policy", 0.6, 0.62)], 0.0025, 0.0, True, 100)
    assert not ok
    assert "slower than the script as written: 0.6" in reason
    assert _judge([contender("policy", 0.6, 0.62, memory=80)], 0.0025, 0.0, True, 100)[0]
    assert _judge([contender("policy", 0.97, 0.98)], 0.0025, 0.0, True, 100)[0]  # timing noise


def test_a_policy_does_not_lose_by_chance_to_a_preset_that_does_the_same() -> None:
    policy = contender("policy", 1.4, 1.6, 1.5)
    assert _judge([policy, contender("bf16 autocast", 1.58, 1.62, 1.7)], 0.0025, 0.0, True, 100)[0]
    assert not _judge([policy, contender("bf16 autocast", 1.7, 1.8, 1.75)], 0.0025, 0.0, True, 100)[0]
