from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from autoprec.tuning.decide.decision import Standing
from autoprec.tuning.decide.presets import presets
from autoprec.tuning.phases.duels import Duels
from autoprec.tuning.phases.preset_gain import best_preset, over_preset
from autoprec.tuning.study.run import Run
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
    assert "by_trials" not in told(policy, written, duels()), "every duel times the script"


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
