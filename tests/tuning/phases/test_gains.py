from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from autoprec.policy import load_policy
from autoprec.trial.protocol import DuelSpec
from autoprec.tuning.decide.decision import Decision, Standing
from autoprec.tuning.decide.presets import COMPILED, presets
from autoprec.tuning.phases.duels import Duels
from autoprec.tuning.phases.gains import (
    beside_compiled,
    best_preset,
    by_parts,
    over_compiled,
    over_preset,
    parts_of,
    with_fastest,
)
from autoprec.tuning.study.run import Metric, Run
from tests.simulated import SimulatedScript, simulated_graph
from tests.tuning.test_engine import here, options, script, search  # noqa: F401

POLICY, PRESET = Standing("mixed", 2.33, (0.0, 0.0)), Standing("int8", 2.18, (0.0, 0.0), preset=True)


def duels(*rounds: dict[str, float]) -> Duels:
    made: Any = object.__new__(Duels)
    made._rounds = {False: list(rounds), True: []}
    return made  # type: ignore[no-any-return]


def told(policy: Standing, preset: Standing, timed: Duels) -> dict[str, Any]:
    (reason,) = over_preset(policy, preset, timed, 0.1)
    return reason.data


def test_two_that_were_timed_together_have_the_interval_of_their_pairs() -> None:
    """Both vary from round to round by half, and one is always 10 % faster."""
    data = told(POLICY, PRESET, duels(*({"mixed": 10.0 + k, "int8": 11.0 + 1.1 * k} for k in range(6))))
    assert data["gain"] == pytest.approx(0.1)
    assert 1.09 < data["low"] <= data["high"] < 1.11


def test_two_that_were_timed_apart_have_the_interval_of_their_intervals() -> None:
    policy, preset = replace(POLICY, low=2.24, high=2.4), replace(PRESET, low=2.1, high=2.26)
    data = told(policy, preset, duels())
    assert (data["low"], data["high"]) == (pytest.approx(2.24 / 2.26), pytest.approx(2.4 / 2.1))
    assert "low" not in told(POLICY, preset, duels()), "one of them was never in a duel"
    assert "by_trials" not in told(POLICY, PRESET, duels()), "modelled ones never are"
    assert told(policy, PRESET, duels())["by_trials"], "4.1 % was once said over a preset that trials alone had timed"
    written = Standing("the script as written", 1.0, (0.0,), reference=True)
    data = told(policy, written, duels())
    assert "by_trials" not in data, "every duel times the script"
    assert (data["gain"], data["low"], data["high"]) == (pytest.approx(1.33), 2.24, 2.4)


def test_what_is_surely_faster_than_the_script_is_not_within_its_timing_noise() -> None:
    """A policy was adopted for 1.06x [1.01, 1.15], and a preset, the script as written, was said to be enough."""
    written = Standing("the script as written", 1.0, (0.0,), reference=True)
    (reason,) = over_preset(replace(POLICY, speedup=1.06, low=1.01, high=1.15), written, duels(), 0.1)
    assert str(reason) == ("6.0% over the best preset (the script as written), timed beside it: 1.06x [1.01, 1.15]")


def test_a_preset_that_was_chosen_is_not_said_to_gain_nothing_over_itself() -> None:
    (reason,) = over_preset(PRESET, PRESET, duels(), 0.1)
    assert str(reason) == "a preset is enough here: int8"
    assert reason.data["gain"] == 0.0


def test_a_preset_that_failed_is_not_said_to_have_been_left_out(here: Path) -> None:  # noqa: F811
    """It is predicted to be fine, as each of its choices ran in other policies."""
    made, _ = search(script(), options(trials=2))
    assert made.setup is not None
    assert made.state is not None
    (name, params), *others = [(n, p) for n, p in presets(made.setup.problem) if not made.setup.problem.is_script(p)]
    outlook = SimpleNamespace(cost=[-9.0] * (1 + len(others)), chance=[0.9] + [0.0] * len(others))
    goals = SimpleNamespace(objective="throughput", cost=lambda *_: 0.0)
    expectation: Any = SimpleNamespace(goals=goals, points=lambda many: many, outlook=lambda _: outlook)
    chosen = Standing("mixed", 1.5, (0.0, 0.0))
    failed = Run(1, "preset", name, params, {}, "oom", "out of memory")
    for tried, told in (([], name), ([failed], "the script as written")):
        best = best_preset(made.setup, made.state, expectation, [], tried, chosen)
        assert best is not None
        assert best.name == told
    ran = Run(2, "preset", name, params, {}, "ok")
    faster = Standing(name, 1.6, (0.0, 0.0), preset=True, run=ran)  # tied with the chosen one, which adds less error
    best = best_preset(made.setup, made.state, expectation, [faster], [ran], chosen)
    assert best is not None
    assert best is faster
    (unrun, _), *_ = others
    outlook.chance[1] = 0.9  # bf16 autocast, norm in fp32, was predicted 1 % faster than bf16 autocast, which had run
    slower = replace(faster, speedup=1.45)
    assert best_preset(made.setup, made.state, expectation, [slower], [ran], chosen) is slower
    slow = replace(faster, speedup=1.2)
    found = best_preset(made.setup, made.state, expectation, [slow], [ran], chosen)
    assert found is not None
    assert (found.name, found.seeds) == (unrun, 0)
    (other, further), *_ = others
    itself = Standing(other, 1.5, (0.0, 0.0), preset=True, run=Run(3, "preset", other, further, {}, "ok"))
    best = best_preset(made.setup, made.state, expectation, [itself, faster], [ran], itself)
    assert best is itself, "what was chosen is a preset: it is not said to gain nothing over another"


@pytest.mark.parametrize(("blocks", "offered"), [(3, False), (4, True)])
def test_an_eager_script_of_many_blocks_is_compiled_by_hand_and_that_gain_is_told_apart(
    here: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    blocks: int,
    offered: bool,
) -> None:
    """Compiling takes a fifth off every step, whatever its precision."""
    monkeypatch.setattr("autoprec.precision.hardware.cpu_bf16_units", lambda: ("AVX512-BF16",))
    simulated = SimulatedScript(graph=simulated_graph(blocks))
    _, result = search(simulated, options(target="cpu", space="", trials=10))
    assert result.verdict == "adopt"
    rows = {row["name"]: row for row in result.presets}
    assert (COMPILED in rows) is offered
    apart = [reason for reason in result.reasons if reason["code"] == "compiled_apart"]
    assert bool(apart) is offered
    if not offered:
        return
    assert rows[COMPILED]["speedup"] == pytest.approx(1 / 0.8)
    assert load_policy(here / result.policy).execution == "compile"
    more = result.best["speedup"] / rows[COMPILED]["speedup"]
    assert apart[0]["precision"] == pytest.approx(more)
    assert (apart[0]["low"], apart[0]["high"]) == (pytest.approx(more), pytest.approx(more))
    assert "compiling the blocks gives 1.25x [1.17, 1.33], the precision " in result.reason
    told = [spec for _, spec in simulated.calls if isinstance(spec, DuelSpec)]
    both = [spec for spec in told if {COMPILED, result.best["name"]} <= {probe.id for probe in spec.probes}]
    assert both, "the blocks compiled alone are in the duel that decides"
    kinds = [{probe.policy.get("execution", "keep") for probe in spec.probes} for spec in told]
    assert all(len(kind) == 1 for kind in kinds), "eager contenders have processes of their own"
    assert all((spec.side_by_side > 1) is (kind == {"keep"}) for spec, kind in zip(told, kinds, strict=True))


def chosen_params(made: Any, result: Any) -> Any:
    return next(run.params for run in made.state.store.records if run.name == result.best["name"] and run.params)


def test_an_adopted_policy_says_what_each_of_its_parts_gains(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """Each is timed beside the policy without it, in one duel."""
    monkeypatch.setattr("autoprec.precision.hardware.cpu_bf16_units", lambda: ("AVX512-BF16",))
    simulated = SimulatedScript(graph=replace(simulated_graph(2), can_fuse=True))
    made, result = search(simulated, options(target="cpu", space="", trials=10, study="parts"))
    assert result.verdict == "adopt"
    params = chosen_params(made, result)
    assert made.setup is not None
    (told,) = [reason for reason in result.reasons if reason["code"] == "by_parts"]
    speeds = {name: middle for name, middle, low, high in told["parts"] if low <= middle <= high}
    assert set(speeds) == set(parts_of(made.setup.problem, params))
    assert "optimizer.update" in speeds
    assert len(speeds) > 1
    assert "each part beside the policy without it: " in result.reason
    (spec,) = [s for _, s in simulated.calls if isinstance(s, DuelSpec) and {p.id for p in s.probes} >= set(speeds)]
    alone = {probe.id: probe.policy for probe in spec.probes}
    assert "update" not in alone["optimizer.update"]["optimizer"]
    assert alone[result.best["name"]]["optimizer"]["update"] == "fused"


def test_a_policy_of_one_part_is_that_part(here: Path) -> None:  # noqa: F811
    made, _ = search(script(), options(trials=2))
    assert made.setup is not None
    problem = made.setup.problem
    params = problem.params_of(problem.choice_names[-1])
    assert list(parts_of(problem, params)) == ["layers"]
    run = Run(1, "search", "a", params, problem.policy(params).to_dict(), "ok")
    assert by_parts(made.setup, Decision("adopt", (), run=run), duels()) == ()
    assert by_parts(made.setup, Decision("stay", (), run=run), duels()) == ()


def setup_of(*, compiled: bool) -> Any:
    return SimpleNamespace(host=SimpleNamespace(compiled=compiled))


@pytest.mark.parametrize("name", [COMPILED, "all bf16, compiled", "bf16 autocast, compiled"])
def test_what_compiles_an_eager_script_is_told_apart_from_what_the_precision_gains(name: str) -> None:
    run = Run(1, "search", "a", {}, {"execution": "compile"}, "ok")
    chosen, alone = Standing("a", 2.0, (0.0, 0.0), run=run), Standing(name, 1.25, (0.0,))
    setup = setup_of(compiled=False)
    (reason,) = over_compiled(setup, chosen, [alone, chosen], duels())
    assert str(reason) == "compiling the blocks gives 1.25x, the precision 1.60x over that"
    (reason,) = over_compiled(setup, chosen, [alone], duels(*({"a": 5.0, name: 9.0} for _ in range(6))))
    assert str(reason) == "compiling the blocks gives 1.25x, the precision 1.80x [1.80, 1.80] over that"
    assert not over_compiled(setup_of(compiled=True), chosen, [alone, chosen], duels())
    eager = replace(chosen, run=replace(run, policy={}))
    assert not over_compiled(setup, eager, [alone, eager], duels())
    assert not over_compiled(setup, chosen, [chosen], duels()), "it did not run"
    assert not over_compiled(setup, replace(alone, run=run), [alone], duels()), "it is nothing else"


def test_a_policy_that_compiles_is_timed_beside_the_blocks_compiled_alone() -> None:
    policy, other = (
        Run(number, "search", name, {}, {"execution": "compile"}, "ok") for number, name in enumerate("ab")
    )
    alone, eager = replace(policy, name=COMPILED), replace(policy, policy={})
    setup, tried = setup_of(compiled=False), [other, alone]
    assert beside_compiled(setup, policy, [policy, other], tried) == [policy, alone, other]
    assert beside_compiled(setup, policy, [policy, alone], tried) == [policy, alone]
    assert beside_compiled(setup, eager, [eager, other], tried) == [eager, other]
    assert beside_compiled(setup, None, [other], tried) == [other]
    assert beside_compiled(setup, policy, [policy, other], [other]) == [policy, other]
    assert beside_compiled(setup_of(compiled=True), policy, [policy, other], tried) == [policy, other]


def test_what_is_fastest_by_blocks_is_in_the_duel_of_what_its_safety_decides_for() -> None:
    """The policy of smallest error was timed as a whole first, then another duel for the fastest: 4 minutes more."""
    runs = [Run(n, "search", f"trial {n}", {}, {}, "ok", metrics={"speedup": Metric(2.0 + n)}) for n in range(3)]
    ranking = tuple(Standing(run.name, 2.0 + run.number, (0.0,), run=run) for run in runs)
    decision = Decision("adopt", (), ranking, 0, rests_on=(0, 1), run=runs[0])
    assert with_fastest(decision, alone=False) == runs[:2]
    assert with_fastest(decision, alone=True) == runs[:1]
    assert with_fastest(replace(decision, index=1, rests_on=(1, 0), run=runs[1]), alone=False) == [runs[1]]
    assert with_fastest(Decision("stay", ()), alone=False) == []
