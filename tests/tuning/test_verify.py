from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from autoprec.errors import PolicyMismatchError, UsageError
from autoprec.policy import LayerRule, Policy, policy_from_dict, resolve
from autoprec.precision.recipes import BUILTIN_RECIPES
from autoprec.trial.protocol import TrainSpec, TrialResult, TrialSpec
from autoprec.tuning.decide.decision import Rules
from autoprec.tuning.decide.noise import Baseline
from autoprec.tuning.decide.presets import presets
from autoprec.tuning.options import SearchOptions
from autoprec.tuning.study.run import Run, metrics_of
from autoprec.tuning.verify import (
    Verification,
    contenders,
    decide,
    first_fresh_seed,
    is_timed,
    judge,
    limits_of,
    may_decide,
    refuse_another_model,
    searched,
    setup_of,
    verify,
)
from autoprec.tuning.workers.local import HostPool
from tests.simulated import SimulatedRunner, SimulatedScript, simulated_graph


def check(
    policy: Policy, folder: Path, *, timed: bool = True, script: SimulatedScript | None = None, seeds: int = 3
) -> Verification:
    simulated, first = script or SimulatedScript(error_scale=0.25), first_fresh_seed(policy)
    options = SearchOptions(command=("train.py",), steps=8, warmup=1, seeds=seeds)
    folder.mkdir(exist_ok=True)
    with HostPool(lambda seed, _folder: SimulatedRunner(simulated, first + seed), folder) as pool:
        setup = setup_of(policy, pool, options)
        return verify(pool, setup, contenders(policy), folder, first_seed=first, timed=timed, tell=lambda _: None)


def uniform(name: str) -> Policy:
    return Policy(recipes={name: BUILTIN_RECIPES[name]}, default=name)


def test_a_good_policy_holds_over_every_seed(tmp_path: Path) -> None:
    result = check(uniform("fp8_rowwise"), tmp_path)
    assert result.verdict == "holds"
    assert len(result.rows[0].speedups) == 3
    assert {row.name for row in result.rows} == {"policy", "bf16 autocast", "all bf16"}
    assert result.to_json()["rows"][0]["speedup"] == result.rows[0].standing.speedup


def test_a_policy_that_a_preset_beats_does_not_hold_and_names_it(tmp_path: Path) -> None:
    slow = Policy(recipes={"bf16": BUILTIN_RECIPES["bf16"]}, layers=({"match": "head", "recipe": "bf16"},))  # type: ignore[arg-type]
    result = check(slow, tmp_path)
    assert (result.verdict, result.why.code) == ("fails", "preset_faster")
    assert result.why.data["name"] in ("bf16 autocast", "all bf16")


def test_a_policy_that_diverges_does_not_hold(tmp_path: Path) -> None:
    result = check(uniform("nvfp4_plain"), tmp_path, script=SimulatedScript(head_factor=40.0))
    assert (result.verdict, result.why.code) == ("fails", "divergence")


def test_emulated_numerics_are_never_judged_by_speed(tmp_path: Path) -> None:
    slow = Policy(recipes={"bf16": BUILTIN_RECIPES["bf16"]}, layers=({"match": "head", "recipe": "bf16"},))  # type: ignore[arg-type]
    result = check(slow, tmp_path, timed=False)
    assert (result.verdict, result.why.code) == ("holds", "holds")
    assert "speed not judged" in result.to_json()["reason"]


def test_speeds_are_those_of_a_duel_with_its_interval_where_they_are_judged(tmp_path: Path) -> None:
    simulated = SimulatedScript(error_scale=0.25)
    for timed, duels in ((True, 1), (False, 0)):
        simulated.calls.clear()
        result = check(uniform("fp8_rowwise"), tmp_path / str(timed), timed=timed, script=simulated)
        assert [spec.kind for _, spec in simulated.calls].count("duel") == duels
        row = result.to_json()["rows"][0]
        assert len(row["divergences"]) == 3
        assert (row["interval"] is not None) is timed
    simulated.compile_s = 20.0  # a script that compiles its model is not an exception
    simulated.calls.clear()
    compiled = check(uniform("fp8_rowwise"), tmp_path / "compiled", script=simulated)
    assert [spec.kind for _, spec in simulated.calls].count("duel") == 1
    assert compiled.rows[0].standing.low is not None


def seeds_of(result: Verification) -> dict[str, int]:
    return {row.name: len(row.standing.divergences) for row in result.rows}


def test_seeds_go_where_they_may_change_the_verdict(tmp_path: Path) -> None:
    fast = check(uniform("fp8_rowwise"), tmp_path / "fast")  # nothing is ahead of it
    assert (fast.verdict, seeds_of(fast)) == ("holds", {"policy": 3, "bf16 autocast": 1, "all bf16": 1})
    slow = Policy(recipes={"bf16": BUILTIN_RECIPES["bf16"]}, layers=({"match": "head", "recipe": "bf16"},))  # type: ignore[arg-type]
    beaten = check(slow, tmp_path / "slow")
    assert (beaten.why.code, seeds_of(beaten)) == ("preset_faster", {"policy": 3, "bf16 autocast": 3, "all bf16": 3})
    untimed = check(slow, tmp_path / "untimed", timed=False)
    assert seeds_of(untimed) == {"policy": 3, "bf16 autocast": 1, "all bf16": 1}
    rough = check(uniform("nvfp4_plain"), tmp_path / "rough", script=SimulatedScript(head_factor=40.0), seeds=8)
    assert (rough.verdict, rough.seeds, seeds_of(rough)["policy"]) == ("fails", 2, 2)


@pytest.mark.parametrize(
    ("gaps", "speedups", "wanted"),
    [
        ((0.0004,), (1.5,), ["policy"]),
        ((0.0004,), (1.0,), ["policy", "bf16 autocast"]),
        ((0.0004, 0.0044), (1.5, 1.5), ["policy"]),  # undecided
        ((0.02,), (1.5,), ["policy"]),  # one seed tells nothing for sure
        ((0.02, 0.03, 0.024, 0.029), (1.5,) * 4, []),
        ((0.02, 0.03, 0.024, 0.029), (1.0,) * 4, []),
    ],
)
def test_who_may_change_the_verdict(gaps: tuple[float, ...], speedups: tuple[float, ...], wanted: list[str]) -> None:
    policies = (measured(*gaps, speedups=speedups), contender("bf16 autocast", 1.4))
    rows = [judge(Rules(), name, runs) for name, runs in policies]
    assert may_decide(rows, timed=True) == wanted
    assert may_decide(rows, timed=False) == wanted[:1]


@pytest.mark.parametrize(
    ("recipe", "target", "device", "timed"),
    [
        ("bf16", "h100", "cpu", False),  # found in a rehearsal: a CPU tells nothing of its speed
        ("bf16", "cpu", "cpu", True),
        ("bf16", None, "cpu", True),
        ("int8", "cpu", "cpu", True),  # the integer units of the CPU: nothing is emulated
        ("int8", "h100", "cpu", False),
        ("fp8_rowwise", None, "cpu", False),
        ("fp8_rowwise", "h100", "NVIDIA H100 80GB HBM3", True),
    ],
)
def test_speed_is_judged_where_it_tells_something(recipe: str, target: str | None, device: str, timed: bool) -> None:
    policy = uniform(recipe).model_copy(update={"evidence": {"target": target} if target else {}})
    assert is_timed(policy, device) is timed


Measured = tuple[str, list[Run]]


def measured(
    *gaps: float, errors: Sequence[float] = (), speedups: Sequence[float] = (), memory: int = 100, name: str = "policy"
) -> Measured:
    """Return a policy's runs, one per gap."""
    runs = []
    for seed, gap in enumerate(gaps):
        speedup = speedups[seed] if speedups else 1.5
        values = {"speedup": speedup, "divergence": gap, "memory_bytes": memory, "step_time_ms": 1.0 / speedup}
        values["gradient_error"] = errors[seed] if errors else math.nan
        runs.append(Run(0, "finalist", name, {}, {}, "ok", metrics=metrics_of(values), seed=seed))
    return name, runs


def contender(name: str, *speedups: float, memory: int = 100) -> Measured:
    return measured(*[0.0001] * len(speedups), speedups=speedups, memory=memory, name=name)


def verdict(*policies: Measured, rules: Rules | None = None) -> tuple[str, str]:
    rules = rules or Rules()
    rows = [judge(rules, name, runs) for name, runs in policies]
    found, reason = decide(rows, rules, timed=True, reference_memory=100)
    return found, reason.code


def test_a_policy_that_is_slower_than_the_script_and_saves_nothing_does_not_hold() -> None:
    assert verdict(contender("policy", 0.6, 0.62)) == ("fails", "slower_than_script")
    assert verdict(contender("policy", 0.6, 0.62, memory=80))[0] == "holds"
    assert verdict(contender("policy", 0.97, 0.98))[0] == "holds"  # timing noise


def test_a_policy_does_not_lose_by_chance_to_a_preset_that_does_the_same() -> None:
    policy = contender("policy", 1.4, 1.6, 1.5)
    assert verdict(policy, contender("bf16 autocast", 1.58, 1.62, 1.7))[0] == "holds"
    assert verdict(policy, contender("bf16 autocast", 1.7, 1.8, 1.75)) == ("fails", "preset_faster")


def test_a_script_noisier_than_the_budget_is_verified_as_it_is_searched(tmp_path: Path) -> None:
    """Rounding the weights once moves its loss by 1 %: gaps of that size speak for nothing, gradient errors do."""
    noisy = SimulatedScript(noise=lambda _seed, _spec: 1.0, error_scale=0.25)
    for name, holds in (("fp8_rowwise", True), ("nvfp4_plain", False)):
        noisy.calls.clear()
        result = check(uniform(name), tmp_path / name, script=noisy, timed=False)
        assert (result.verdict == "holds") is holds, result.why
        assert (result.why.data["caveat"] if holds else result.why).code.endswith(
            "gradient" if holds else "gradient_error"
        )
        benign = [seed for seed, spec in noisy.calls if isinstance(spec, TrainSpec) and spec.perturb]
        assert benign == [0, 0, 0, 0, 1, 2][: 6 if holds else 5]  # what has surely failed gets no third seed
    assert result.noise_floor > 0.0025
    steady = check(uniform("nvfp4_plain"), tmp_path / "steady", timed=False)
    assert steady.verdict == "fails", "a floor below the budget forgives nothing"


def test_a_mean_within_the_budget_is_not_enough() -> None:
    assert verdict(measured(0.0004, 0.0044)) == ("undecided", "too_few_seeds")


def judged(policy: Measured, limit: float | None = None, noise: float | None = None) -> str:
    return verdict(policy, rules=Rules(max_gradient=limit, gradient_noise=noise))[0]


def test_a_run_that_did_not_execute_what_was_asked_fails_as_in_a_search(tmp_path: Path) -> None:
    name, runs = measured(0.0001, 0.0001)
    runs[1] = replace(runs[1], status="mismatch", reason="1 layers did not run as asked", metrics={})
    assert verdict((name, runs)) == ("fails", "failed")
    row = judge(Rules(), name, runs).to_json()
    assert row["failures"] == ("mismatch: 1 layers did not run as asked",)
    assert row["divergence"] == 0.0001


def test_what_chance_may_explain_is_undecided_and_only_what_is_sure_fails() -> None:
    """A search adopts what is surely within a limit; other seeds may measure the same policy a little above it."""
    assert judged(measured(0.0004, 0.0003, 0.0004)) == "holds"
    assert judged(measured(0.002, 0.003, 0.0024, 0.0029)) == "undecided"
    assert judged(measured(0.02, 0.03, 0.024, 0.029)) == "fails"
    good = (0.0004, 0.0003, 0.0004)
    assert judged(measured(*good, errors=(0.0584, 0.0584, 0.0584)), 0.06, 0.5) == "holds"
    assert judged(measured(*good, errors=(0.0612, 0.0612, 0.0612)), 0.06, 0.5) == "undecided"
    assert judged(measured(*good, errors=(0.1, 0.1, 0.1)), 0.06, 0.5) == "fails"


def test_the_limits_are_those_of_the_search_unless_others_are_asked_for() -> None:
    plain = uniform("fp8_rowwise")
    known = plain.model_copy(update={"evidence": {"max_divergence": 0.001, "max_gradient_error": 0.3}})
    for policy, asked, limits in ((plain, (None, None), (0.0025, 0.12)), (known, (None, None), (0.001, 0.3)),
                                  (known, (0.004, 0.2), (0.004, 0.2))):  # fmt: skip
        assert tuple(limits_of(policy, *asked).values()) == limits
    metric = {"metric": "f1", "better": "higher"}
    found = plain.model_copy(update={"evidence": {**metric, "max_change": 0.01, "max_gradient_error": 0.3}})
    assert limits_of(found, None, None) == metric | {"max_change": 0.01, "max_gradient_error": 0.3}
    assert limits_of(found, None, 0.2, 0.02) == metric | {"max_change": 0.02, "max_gradient_error": 0.2}
    sides = found.model_copy(update={"evidence": found.evidence | {"metric": "rollout_kl", "max_divergence": 0.02}})
    assert limits_of(sides, None, None)["max_divergence"] == 0.02  # the loss counts beside it
    assert limits_of(found, 0.001, None) == {"max_divergence": 0.001, "max_gradient_error": 0.3}  # by its loss
    with pytest.raises(UsageError, match="--max-change is of a metric"):
        SearchOptions(command=("train.py",), **limits_of(plain, None, None, 0.01))


def test_gradient_errors_are_measured_under_every_seed_and_told_in_both_units(tmp_path: Path) -> None:
    steady = check(uniform("fp8_rowwise"), tmp_path / "steady")
    assert len(steady.to_json()["rows"][0]["gradient_errors"]) == 3
    result = check(uniform("fp8_rowwise"), tmp_path / "rough", script=SimulatedScript(error_scale=2.0))
    assert (len(result.to_json()["rows"][0]["gradient_errors"]), result.seeds) == (2, 2)
    assert result.limits == {"divergence": 0.0025, "gradient_error": pytest.approx(0.06), "gradient_noise": 0.5}
    assert (result.verdict, result.why.code) == ("fails", "gradient_error")
    assert result.why.data == {"error": result.rows[0].standing.gradient_error, "limit": 0.06, "noise": 0.5}


def test_what_the_search_found_is_told_beside_it() -> None:
    evidence = {"divergence": 0.0003, "gradient_error": 0.05, "gradient_noise": 0.5, "seeds": 1, "steps": 20}
    known = uniform("fp8_rowwise").model_copy(update={"evidence": evidence})
    words = "divergence 0.030%, gradient error 5 % (0.1 of the noise), over 1 paired seed of 20 steps"
    assert searched(known) == words
    by_metric = known.model_copy(update={"evidence": evidence | {"metric": "f1"}})
    assert searched(by_metric).startswith("f1 changed by 0.030%")
    assert searched(uniform("fp8_rowwise")) == ""


def test_a_preset_of_a_searchs_name_is_that_searchs_policy(tmp_path: Path) -> None:
    """The head of 8 outputs cannot run in FP8: a search keeps it in bf16, and so does verify."""
    graph = simulated_graph(2, width=128)
    *rest, head = graph.layers
    outputs = {"fprop": "n", "dgrad": "k", "wgrad": "m"}  # which of M, K, N is the number of outputs
    small = tuple(replace(gemm, **{outputs[gemm.role]: 8}) for gemm in head.gemms)
    graph = replace(graph, layers=(*rest, replace(head, gemms=small)))
    simulated = SimulatedScript(graph=graph)
    policy = Policy.model_validate(
        {
            "recipes": {"fp8_delayed": BUILTIN_RECIPES["fp8_delayed"]},
            "default": "fp8_delayed",
            "activations": "bf16",
            "evidence": {"target": "h100"},
        }
    )
    with HostPool(lambda seed, _folder: SimulatedRunner(simulated, seed), tmp_path) as pool:
        setup = setup_of(policy, pool, SearchOptions(command=("train.py",)))
        assert (setup.target.name, setup.measured) == ("h100", True)
        elsewhere = policy.model_copy(update={"evidence": {"target": "a machine that is described elsewhere"}})
        assert setup_of(elsewhere, pool, SearchOptions(command=("train.py",))).target.is_cpu
    unknown = replace(simulated, device="NVIDIA Unheard Of")
    with HostPool(lambda seed, _folder: SimulatedRunner(unknown, seed), tmp_path / "gpu") as pool:
        there = setup_of(elsewhere, pool, SearchOptions(command=("train.py",)))
        assert (there.measured, there.target.is_cpu) == (True, False), "it is timed on a GPU that no table has, too"
    names = [layer.name for layer in graph.tunable]
    searched = setup.problem.policy(dict(presets(setup.problem))["fp8_delayed, head in bf16"])
    verified = policy_from_dict(contenders(policy, setup)["fp8_delayed, head in bf16"])
    assert resolve(verified, names) == resolve(searched, names)
    assert resolve(verified, names)["head"].fprop == BUILTIN_RECIPES["bf16"]
    mixed = policy.model_copy(update={"layers": (LayerRule(match="head", recipe="keep"),)})
    alone = policy_from_dict(contenders(mixed)["all fp8_delayed"])
    assert resolve(alone, names)["head"].fprop != BUILTIN_RECIPES["bf16"]


def test_a_policy_that_is_a_preset_is_not_run_against_itself() -> None:
    """It lost to itself by chance: "does not hold: preset 'bf16 autocast' is faster (2.89x against 2.72x)"."""
    rules = {"layers": [{"match": "*", "recipe": "half"}], "recipes": {"half": {"format": "bf16"}}}
    told: list[str] = []
    found = contenders(
        Policy.model_validate(rules | {"activations": "bf16", "evidence": {"seeds": 2}}), None, told.append
    )
    assert list(found) == ["policy"]
    assert told == ["the policy is the preset 'bf16 autocast', which is not run beside it"]
    rules["layers"] = [{"match": "head", "recipe": "keep"}, *rules["layers"]]
    assert "bf16 autocast" in contenders(Policy.model_validate(rules | {"activations": "bf16"}))


def test_presets_run_by_the_backends_that_the_policy_was_found_with() -> None:
    backends = {"fp8_rowwise": {"backend": "torchao", "reason": "torchao: 1.2x native at fp8_rowwise, measured"}}
    mixed = {"layers": (LayerRule(match="head", recipe="keep"),)}
    policy = uniform("fp8_rowwise").model_copy(update=mixed | {"evidence": {"target": "h100", "backends": backends}})
    found = contenders(policy)
    assert found["all fp8_rowwise"]["evidence"] == {"backends": backends}
    assert "evidence" not in contenders(uniform("fp8_rowwise").model_copy(update=mixed))["all fp8_rowwise"]


@pytest.mark.parametrize("asked", [(0.0, None), (None, 0.0), (None, -1.0), (float("nan"), None)])
def test_a_limit_of_nothing_is_refused_instead_of_taking_another(asked: tuple[float | None, float | None]) -> None:
    with pytest.raises(UsageError, match="is not above 0"):
        limits_of(uniform("fp8_rowwise"), *asked)


def test_where_training_is_chaotic_what_the_loss_says_for_sure_is_not_undecided() -> None:
    """Nor is it where the gradient error is beyond its limit as well, by so little that chance may explain that."""
    chaotic = Baseline(0.01, rounding_gaps=(0.01, 0.011, 0.009), rounding_excess=(0.0, 0.0, 0.0))
    errors = (0.0612, 0.0612, 0.0612)
    rules = Rules(baseline=chaotic, max_gradient=0.06, gradient_noise=0.5)
    for gaps, found in (((0.5, 0.6, 0.55), "fails"), ((0.01, 0.012, 0.011), "undecided")):
        assert verdict(measured(*gaps, errors=errors), rules=rules)[0] == found


@pytest.mark.parametrize(("gaps", "found"), [((0.1, 0.11, 0.1), "fails"), ((0.002, 0.0035, 0.002), "undecided")])
def test_what_the_loss_says_beside_a_mismatch_is_sure_or_not_by_its_own_seeds(
    gaps: tuple[float, ...], found: str
) -> None:
    runs = [
        replace(run, metric="rollout_kl", losses=(4.0, 4.0 * (1 + gap)), reference_losses=(4.0, 4.0))
        for run, gap in zip(measured(*[0.0] * len(gaps))[1], gaps, strict=True)
    ]
    loss = Rules(0.0025, Baseline(1e-6, (1e-6,)), max_gradient=1.0)
    rules = Rules(0.5, Baseline(1e-6, (1e-6,), metric="rollout_kl"), max_gradient=1.0, loss=loss)
    row = judge(rules, "both", runs)
    assert row.standing.rejection is not None
    assert row.unsure is (found == "undecided")


@pytest.mark.parametrize(("evidence", "first"), [({}, 0), ({"seeds": 3}, 3), ({"seeds": 0}, 0)])
def test_it_runs_under_seeds_that_the_search_has_not_used(tmp_path: Path, evidence: dict[str, int], first: int) -> None:
    policy = uniform("fp8_rowwise").model_copy(update={"evidence": evidence})
    assert first_fresh_seed(policy) == first
    script = SimulatedScript(error_scale=0.25)
    result = check(policy, tmp_path, script=script, seeds=2)
    assert {seed for seed, _ in script.calls} == {first, first + 1}
    assert result.verdict == "holds"
    assert result.to_json()["first_seed"] == first


def test_a_policy_of_another_model_is_refused_before_the_runs(tmp_path: Path) -> None:
    asked: list[TrialSpec] = []

    class Misfit(SimulatedRunner):
        def run(self, spec: TrialSpec) -> TrialResult:
            asked.append(spec)
            if spec.policy is None:
                return super().run(spec)
            return TrialResult("mismatch", "2 of 3 rules match no tunable layer")

    policy = Policy.model_validate({**uniform("bf16").to_dict(), "model": {"class": "ViT", "parameters": 7}})
    with HostPool(lambda seed, _folder: Misfit(SimulatedScript(), seed), tmp_path) as pool:
        with pytest.raises(PolicyMismatchError, match="2 of 3 rules"):
            refuse_another_model(policy, pool, "auto")
        assert [spec.total for spec in asked] == [1]
        setup = setup_of(policy, pool, SearchOptions(command=("train.py",), steps=8, seeds=2))
        with pytest.raises(PolicyMismatchError, match="2 of 3 rules"):
            verify(pool, setup, contenders(policy), tmp_path, timed=True, tell=lambda _: None)
        assert sum(spec.policy is not None for spec in asked) == 2
    evidence = {"divergence": 0.0003, "seeds": 1, "steps": 20}
    known = policy.model_copy(update={"evidence": evidence})
    assert searched(known, {"class": "ViT", "parameters": 7})
    assert searched(known, {"class": "Net", "parameters": 7}) == ""
