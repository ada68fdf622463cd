"""Contenders of a duel take turns in processes as long as the script has steps for that, else in whole runs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from autoprec.support.plain import Document
from autoprec.trial.intervals import FEWEST
from autoprec.trial.protocol import REFERENCE, DuelRounds, DuelSpec, TrainSpec, TrialResult
from autoprec.tuning.study.run import Run
from autoprec.tuning.timing.in_turns import PROCESSES, can_be_exchanged, contenders, in_turns, timed_together, times_of

POLICIES: dict[str, Document] = {name: {} for name in "abcd"}


@pytest.mark.parametrize(
    ("changes", "can"),
    [
        ({}, True),
        ({"activations": "bf16"}, True),
        ({"execution": "compile"}, True),
        ({"embedding_gradient": 0.1}, True),
        ({"optimizer": {"exp_avg": "bf16"}}, False),
        ({"communication": {"gradients": "bf16"}}, False),
        ({"loss_scaling": "dynamic", "activations": "fp16"}, False),
    ],
)
def test_what_changes_stored_values_cannot_be_taken_off_between_two_steps(changes: dict, can: bool) -> None:
    assert can_be_exchanged({"schema": "autoprec.policy/1", **changes}) is can


class Short:
    """A script that ends after some steps; blocks of a process that does not know that are too long for a round."""

    def __init__(self, steps: int, *, knows: int = FEWEST // 2, start_s: float = 0.0) -> None:
        self.steps, self.knows, self.start_s = steps, knows, start_s
        self.asked: list[DuelSpec] = []

    def __call__(self, spec: DuelSpec) -> TrialResult:
        self.asked.append(spec)
        time.sleep(self.start_s)
        times = {REFERENCE: 2.0} | {probe.id: 1.0 for probe in spec.probes}
        rounds = (times,) * (self.knows if spec.ends_after == self.steps else 0)
        return TrialResult("ok", answer=DuelRounds(rounds, steps=self.steps), start_s=self.start_s)

    @property
    def names(self) -> list[str]:
        return ["".join(probe.id for probe in spec.probes) for spec in self.asked]


@pytest.mark.parametrize(
    ("steps", "asked"),
    [
        (60, ["abcd", "abcd", "abcd"]),
        (50, ["abcd", "abcd", "abcd"]),
        (45, ["abcd", "abc", "abc", "d", "d"]),
        (32, ["abcd", "ab", "ab", "cd", "cd"]),
        (23, ["abcd", "a", "a", "b", "b", "c", "c", "d", "d"]),
        (22, ["abcd"]),  # not even one fits
        (5, ["abcd"]),
    ],
)
def test_a_script_that_ends_soon_is_timed_in_short_blocks_of_as_many_as_fit(steps: int, asked: list[str]) -> None:
    script = Short(steps)
    timed = timed_together(script, DuelSpec(), POLICIES, 60.0)
    assert script.names == asked
    assert timed.ends_after == steps
    assert all(len(times_of(timed.rounds, name)) == FEWEST * (steps >= 23) for name in POLICIES)
    again = Short(steps)
    timed_together(again, DuelSpec(ends_after=steps), POLICIES, 60.0)
    assert again.names == asked[1:], "the next duel knows it"


@pytest.mark.parametrize("steps", [23, 32, 41, 50, 60, 400])
def test_as_many_fit_as_settle_and_have_their_rounds(steps: int) -> None:
    count = contenders(steps)
    assert count
    for more, fits in ((0, True), (1, False)):
        lanes = count + 1 + more
        assert (3 * (lanes + 1) + 2 * (lanes * FEWEST // 2 + 1) <= steps) is fits


def test_a_process_without_a_round_of_short_blocks_is_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    script = Short(60, knows=0)
    assert timed_together(script, DuelSpec(), POLICIES, 60.0).rounds == []
    assert len(script.asked) == 2
    few = Short(60, knows=1)
    assert len(timed_together(few, DuelSpec(), POLICIES, 60.0).rounds) == PROCESSES - 1
    forked = Short(60)
    assert timed_together(forked, DuelSpec(side_by_side=2), POLICIES, 60.0).ends_after is None
    assert len(forked.asked) == 1, "each contender had a process, and as many steps as there are"


@pytest.mark.parametrize(("on_the_clock", "processes"), [(True, 2), (False, 3)])
def test_no_process_is_begun_that_a_time_budget_would_end_before_its_first_block(
    on_the_clock: bool, processes: int
) -> None:
    script = Short(60, start_s=0.1)
    timed_together(script, DuelSpec(on_the_clock=on_the_clock), POLICIES, 0.25)
    assert len(script.asked) == processes


def test_a_failure_and_a_refusal_are_told() -> None:
    crashed = timed_together(lambda _: TrialResult("oom", "no memory"), DuelSpec(), POLICIES, 1.0)
    assert crashed.failed == "oom: no memory"
    refused = TrialResult("ok", answer=DuelRounds(refused={"a": "not here"}))
    assert timed_together(lambda _: refused, DuelSpec(), POLICIES, 1.0).refused == {"a": "not here"}


def whole_runs(times: dict[str, float | str], log: Path | None = None, **options: Any) -> tuple[Any, list[TrainSpec]]:
    """A search whose runs take so many milliseconds a step, by the policy's name, or end so."""
    asked: list[TrainSpec] = []

    def on_host(spec: TrainSpec) -> TrialResult:
        asked.append(spec)
        took = times[str((spec.policy or {}).get("name", REFERENCE))]
        if isinstance(took, str):
            return TrialResult("crashed", took)
        return TrialResult("ok", step_ms=(took,) * (spec.steps + spec.warmup), warmup=spec.warmup)

    runner = SimpleNamespace(
        on_host=on_host,
        turns=lambda _specs: log,
        train_spec=lambda policy, _params, **changes: TrainSpec(policy=policy, **changes),
    )
    setup = SimpleNamespace(
        reference_policy=lambda: None, options=SimpleNamespace(**{"budget_s": None, "steps": 20, "warmup": 3} | options)
    )

    def begin(names: Sequence[str], within_s: float = 0.0) -> list[dict[str, float]]:
        runs = [Run(0, "search", name, {}, {"name": name}, "ok") for name in names]
        state: Any = SimpleNamespace(elapsed=lambda: float(len(asked)))
        return in_turns(setup, runner, state, runs, within_s, by_block=False)  # type: ignore[arg-type]

    return begin, asked


def test_whole_runs_take_turns_whose_order_changes() -> None:
    begin, asked = whole_runs({REFERENCE: 4.0, "a": 2.0, "b": 1.0})
    rounds = begin(["a", "b"])
    assert rounds == [{REFERENCE: 4.0, "a": 2.0, "b": 1.0}] * FEWEST
    order = [(spec.policy or {}).get("name", "") for spec in asked[:6]]
    assert order == ["", "a", "b", "b", "a", ""]


@pytest.mark.parametrize(
    ("steps", "warmup", "taken"), [(20, 3, (6, 2)), (4, 1, (4, 1)), (6, 2, (6, 2)), (4, 5, (4, 2))]
)
def test_whole_runs_have_no_more_steps_than_trials_have(steps: int, warmup: int, taken: tuple[int, int]) -> None:
    begin, asked = whole_runs({REFERENCE: 4.0, "a": 2.0}, steps=steps, warmup=warmup)
    begin(["a"])
    assert {(spec.steps, spec.warmup) for spec in asked} == {taken}


@pytest.mark.parametrize(
    ("failing", "of_a", "of_b"), [("a", 0, FEWEST), ("b", FEWEST, 0), (REFERENCE, 0, 0)], ids=["a", "b", "reference"]
)
def test_what_fails_in_whole_runs_is_in_no_further_round(failing: str, of_a: int, of_b: int) -> None:
    begin, asked = whole_runs({REFERENCE: 4.0, "a": 2.0, "b": 1.0} | {failing: "out of memory"})
    rounds = begin(["a", "b"])
    assert [len(times_of(rounds, name)) for name in "ab"] == [of_a, of_b]
    assert sum((spec.policy or {}).get("name", REFERENCE) == failing for spec in asked) == 1


def test_whole_runs_end_with_the_time_budget() -> None:
    begin, asked = whole_runs({REFERENCE: 4.0, "a": 2.0}, budget_s=5.0)  # of a second each
    assert len(begin(["a"])) == 3
    assert len(asked) == 6


def test_runs_in_turns_of_a_search_that_was_killed_count(tmp_path: Path) -> None:
    """A policy that cannot be exchanged is timed in adjacent runs, and those began anew after each kill."""
    asked: list[TrainSpec] = []
    log = tmp_path / "rounds.jsonl"

    def on_host(spec: TrainSpec) -> TrialResult:
        asked.append(spec)
        if len(asked) == 2 * FEWEST + 2:
            raise KeyboardInterrupt
        return TrialResult("ok", step_ms=(1.0 if spec.policy else 2.0,) * spec.steps)

    runner: Any = SimpleNamespace(
        on_host=on_host,
        turns=lambda specs: log if [bool(spec.policy) for spec in specs] == [False, True] else None,
        train_spec=lambda policy, _params, **changes: TrainSpec(policy=policy, **changes),
    )
    setup: Any = SimpleNamespace(
        reference_policy=lambda: None, options=SimpleNamespace(budget_s=None, steps=20, warmup=3)
    )
    state: Any = SimpleNamespace()
    run = Run(0, "search", "a", {}, {"optimizer": {"exp_avg": "bf16"}}, "ok")
    with pytest.raises(KeyboardInterrupt):
        in_turns(setup, runner, state, [run], 1e9, by_block=False)
    assert len(asked) == 2 * FEWEST + 2, "the last pair is not whole"
    found = in_turns(setup, runner, state, [run], 1e9, by_block=False)
    assert times_of(found, "a") == [(2.0, 1.0)] * 2 * FEWEST
    assert len(asked) == 2 * FEWEST + 2 + 2 * FEWEST
    assert not log.exists(), "what was used is not used again"
