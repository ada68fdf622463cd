"""The speed of what decides comes from a duel: what is timed there, when, and what of it is stored."""

from __future__ import annotations

from pathlib import Path

import pytest

from autoprec.tuning.phases.duels import can_be_exchanged
from autoprec.tuning.study.run import DUEL, Metric, Run, metrics_of, pooled
from tests.simulated import SimulatedScript
from tests.tuning.test_engine import here, options, search  # noqa: F401


def test_what_is_adopted_was_timed_in_a_duel_and_says_its_interval(here: Path) -> None:  # noqa: F811
    simulated = SimulatedScript()
    made, result = search(simulated, options(target="cpu", space="cpu-bf16", trials=6))
    assert result.verdict == "adopt"
    duels = {run.name: run for run in made.records if run.kind == DUEL}
    assert {"bf16 autocast", "all bf16"} <= duels.keys(), "what people write by hand"
    assert result.best["name"] in duels
    kinds = [
        spec.kind if spec.kind != "train" else ("policy" if spec.policy else "script") for _, spec in simulated.calls
    ]
    assert kinds.index("duel") > kinds.index("policy")
    assert all(run.metrics["speedup"].low is not None for run in duels.values())


def test_the_first_trials_are_what_people_write_by_hand(here: Path) -> None:  # noqa: F811
    made, _ = search(SimulatedScript(), options(target="h100", trials=8))
    first = sorted((run for run in made.records if run.kind in ("preset", "search")), key=lambda run: run.number)[:3]
    assert [run.name for run in first] == ["all bf16", "all fp8_tensorwise", "all fp8_delayed"]


def test_a_rehearsal_times_nothing(here: Path) -> None:  # noqa: F811
    simulated = SimulatedScript()
    search(simulated, options(target="h100", trials=4))
    assert all(spec.kind != "duel" for _, spec in simulated.calls)


@pytest.mark.parametrize(
    ("changes", "can"),
    [
        ({}, True),
        ({"activations": "bf16"}, True),
        ({"execution": "compile"}, True),
        ({"optimizer": {"exp_avg": "bf16"}}, False),
        ({"communication": {"gradients": "bf16"}}, False),
        ({"loss_scaling": "dynamic", "activations": "fp16"}, False),
        ({"stability": {"outlier": 8.0}}, False),
    ],
)
def test_what_changes_stored_values_cannot_be_taken_off_between_two_steps(changes: dict, can: bool) -> None:
    assert can_be_exchanged({"schema": "autoprec.policy/1", **changes}) is can


def test_the_speed_of_a_duel_stands_for_that_of_trials() -> None:
    figures = {"speedup": 1.2, "step_time_ms": 100.0, "divergence": 0.001, "memory_bytes": 1.0, "throughput": 10.0}
    trials = [
        Run(number, kind, "a", {}, {}, "ok", metrics=metrics_of(figures | {"speedup": speed}), seed=number)
        for number, kind, speed in ((0, "search", 1.2), (1, "finalist", 1.4))
    ]
    duel = Run(2, DUEL, "a", {}, {}, "ok", metrics={"speedup": Metric(1.5, low=1.48, high=1.52)})
    assert pooled(trials)["a"]["speedup"] == pytest.approx(1.3)
    found = pooled([*trials, duel])["a"]
    assert found.metrics["speedup"] == Metric(1.5, low=1.48, high=1.52)
    assert (found["divergence"], found["seeds"]) == (0.001, 2.0)
    assert found["throughput"] == pytest.approx(10.0 * 1.5 / 1.2)
    assert pooled([trials[0], duel])["a"]["speedup"] == 1.5
