from __future__ import annotations

import os
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autoprec.precision.hardware import target
from autoprec.trial.command import ScriptCommand
from autoprec.trial.losses import Series
from autoprec.trial.protocol import HostInfo, TrainSpec, TrialResult, TrialSpec
from autoprec.tuning.engine import Search
from autoprec.tuning.events import Listeners
from autoprec.tuning.paired import (
    BEFORE_REFERENCE_S,
    COMPILER_BYTES,
    COMPILING_S,
    LEAST_TIMEOUT_S,
    PairedRunner,
    baseline_of,
)
from autoprec.tuning.setup import Setup
from autoprec.tuning.state import SearchState
from autoprec.tuning.study.run import DUEL
from autoprec.tuning.workers.local import HostPool
from tests.simulated import SimulatedRunner
from tests.tuning.test_engine import here, options, plain_search, script  # noqa: F401


@pytest.fixture
def setup() -> Setup:
    made = plain_search().made.setup
    assert made is not None
    return made


@pytest.fixture
def state() -> SearchState:
    known = plain_search().made.state
    assert known is not None
    return replace(known, seconds=replace(known.seconds), notes=[])


def runner_of(setup: Setup, state: SearchState, folder: Path) -> PairedRunner:
    return PairedRunner(setup, HostPool(lambda seed, _: SimulatedRunner(script(), seed), folder), state)


def test_a_trial_may_stand_still_for_twenty_runs_of_the_reference(
    setup: Setup, state: SearchState, tmp_path: Path
) -> None:
    runner = runner_of(setup, state, tmp_path)
    state.seconds.reference_run_s = 0.5
    assert runner.trial_timeout() == LEAST_TIMEOUT_S
    state.seconds.reference_run_s = 40.0
    assert runner.trial_timeout() == pytest.approx(800.0)
    assert runner.train_spec(None).timeout_s == pytest.approx(800.0)
    state.own = None
    assert runner.trial_timeout() == BEFORE_REFERENCE_S


def test_what_compiles_may_stand_still_for_five_starts_of_the_script(
    setup: Setup, state: SearchState, tmp_path: Path
) -> None:
    """The reference's graphs are in torch's cache by its first run: those of a U-Net took longer than twenty runs."""
    state.seconds.reference_run_s = 4.8
    setup = replace(setup, host=replace(setup.host, setup_s=93.0))
    eager = runner_of(setup, state, tmp_path)
    assert eager.train_spec({"activations": "bf16"}).timeout_s == pytest.approx(96.0)
    assert eager.train_spec({"execution": "compile"}).timeout_s == pytest.approx(465.0)
    compiled = runner_of(replace(setup, host=replace(setup.host, compiled=True)), state, tmp_path)
    assert compiled.train_spec({"activations": "bf16"}).timeout_s == pytest.approx(465.0)
    assert compiled.scan_spec(None, ()).timeout_s == pytest.approx(465.0)
    setup = replace(setup, host=replace(setup.host, setup_s=3.0, compiled=True))
    assert runner_of(setup, state, tmp_path).trial_timeout() == COMPILING_S


def test_forked_trials_share_their_random_state_and_others_are_reseeded(
    setup: Setup, state: SearchState, tmp_path: Path
) -> None:
    runner = runner_of(setup, state, tmp_path)
    assert runner.train_spec(None).seed is None
    assert runner.train_spec({}, steps=3, anneal=True).steps == 3
    assert runner.workers == 1


@pytest.mark.parametrize(
    ("measured", "workers", "alone"), [(True, 0, True), (True, 1, True), (True, 2, False), (False, 0, False)]
)
def test_what_is_timed_alone_has_the_scripts_own_threads(
    setup: Setup, state: SearchState, tmp_path: Path, measured: bool, workers: int, alone: bool
) -> None:
    known = {"options": replace(setup.options, workers=workers), "measured": measured}
    runner = runner_of(replace(setup, target=target("cpu"), **known), state, tmp_path)
    assert runner.train_spec(None).alone is alone
    assert not runner.scan_spec(None, ()).alone  # its probes are at work beside each other
    assert runner.duel_spec(None, compiling=False).alone


@pytest.mark.parametrize(
    ("changed", "cores", "copies", "at_once"),
    [
        ({}, 2, 99, 2),
        ({}, 64, 99, 4),
        ({}, 1, 99, 1),
        ({}, 64, 2, 2),
        ({}, 64, None, 1),
        ({"compiled": False}, 64, 99, 1),
        ({"world_size": 2}, 64, 99, 1),  # its ranks would wait for each other
        ({"workers": 1}, 64, 99, 1),
        ({"target": "h100"}, 64, 99, 1),
    ],
)
def test_trials_of_a_compiled_script_compile_beside_each_other(
    setup: Setup,
    state: SearchState,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    changed: dict[str, Any],
    cores: int,
    copies: int | None,
    at_once: int,
) -> None:
    monkeypatch.setattr("autoprec.tuning.paired.cores", lambda: cores)
    needed = COMPILER_BYTES + 16 * int(setup.host.model["parameters"])
    free = None if copies is None else 2 * copies * needed  # half of it is for others
    monkeypatch.setattr("autoprec.tuning.paired.free_bytes", lambda: free)
    known = {"compiled": True, "world_size": 1, "gpus": 1, "target": "cpu", "workers": 0} | changed
    asked, where = replace(setup.options, workers=known.pop("workers")), target(known.pop("target"))
    one = replace(setup, measured=True, options=asked, target=where, host=replace(setup.host, **known))
    runner, turns = runner_of(one, state, tmp_path), not changed
    assert (runner.workers, runner.final_workers) == (at_once, at_once)
    assert runner.train_spec(None).turns is turns
    assert runner.train_spec(None).alone is one.is_timed_alone


@pytest.mark.parametrize(
    ("count", "asked", "free", "launch", "measured", "at_once"),
    [
        (2, 0, 1 << 40, "fork", True, 2),  # trials are timed one at a time, and no probe is timed
        (64, 0, 1 << 40, "fork", True, 8),
        (64, 3, 1 << 40, "fork", True, 3),
        (2, 1, 1 << 40, "fork", True, 1),
        (16, 0, 7 << 30, "fork", True, 3),  # of 1 GiB each, in half of the memory
        (16, 0, 1 << 30, "fork", True, 1),
        (16, 0, None, "fork", True, 1),
        (16, 0, 1 << 40, "process", True, 1),  # one process plays all of them
        (4, 0, 1 << 20, "fork", False, 4),  # a rehearsal's runs share the machine anyway
    ],
)
def test_probes_share_all_cores_and_half_of_the_memory(
    setup: Setup,
    state: SearchState,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    count: int,
    asked: int,
    free: int | None,
    launch: str,
    measured: bool,
    at_once: int,
) -> None:
    monkeypatch.setattr("autoprec.tuning.paired.cores", lambda: count)
    monkeypatch.setattr("autoprec.tuning.paired.free_bytes", lambda: free)
    known = {"options": replace(setup.options, workers=asked), "host": replace(setup.host, launch=launch)}
    state.own = replace(state.reference, memory_bytes=1 << 30)
    runner = runner_of(replace(setup, measured=measured, target=target("cpu"), **known), state, tmp_path)
    spec = runner.scan_spec(None, ())
    assert spec.side_by_side == at_once
    one_more = (at_once + 1) << 31
    assert spec.stays is (launch == "fork" and free is not None and free >= one_more)
    state.own = None
    assert not runner.scan_spec(None, ()).stays
    assert runner.scan_spec(None, ()).side_by_side == (1 if measured else at_once)


@pytest.mark.parametrize(("load", "measured", "told"), [(12.0, True, True), (1.0, True, False), (12.0, False, False)])
def test_a_busy_cpu_is_told_where_steps_are_timed_on_it(
    setup: Setup,
    state: SearchState,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    load: float,
    measured: bool,
    told: bool,
) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (load, load, load))
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    on_cpu = replace(setup, target=target("cpu"), measured=measured, options=replace(setup.options, workers=1))
    runner_of(on_cpu, state, tmp_path).doubt_load()
    busy = [note for note in state.notes if "busy with other work (load 11.0 on 2 cores)" in note]
    assert bool(busy) is told
    assert all("speed-ups are those beside it" in note for note in busy)


@pytest.mark.parametrize(("within_s", "ends"), [(0.05, True), (0.0, True), (30.0, False), (None, False)])
def test_what_a_run_may_take_counts_from_before_its_script_is_started(
    setup: Setup, state: SearchState, tmp_path: Path, within_s: float | None, ends: bool
) -> None:
    """A further seed starts the script anew: on a busy machine that took longer than all that was left."""
    asked: list[TrainSpec] = []
    over = threading.Event()

    class Slow(SimulatedRunner):
        def start(self) -> HostInfo:
            over.wait(30.0 if ends else 0.2)
            return super().start()

        def run(self, spec: TrialSpec) -> TrialResult:
            assert isinstance(spec, TrainSpec)
            asked.append(spec)
            return super().run(spec)

    with HostPool(lambda seed, _: Slow(script(), seed), tmp_path) as pool:
        found = PairedRunner(setup, pool, state).on_host(TrainSpec(steps=4, within_s=within_s), 1)
        over.set()
    assert found.status == ("out_of_time" if ends else "ok")
    assert ("not at its first training step" in found.reason) is ends
    if not ends:
        (spec,) = asked
        assert spec.within_s is None if within_s is None else 0.0 < (spec.within_s or 0.0) < 29.9


@pytest.mark.parametrize(
    ("budget_s", "elapsed_s", "over"),
    [(None, 1e9, False), (100.0, 99.0, False), (100.0, 119.0, False), (100.0, 121.0, True)],
)
def test_a_search_is_over_when_its_budget_and_a_fifth_more_are_used_up(
    setup: Setup, state: SearchState, tmp_path: Path, budget_s: float | None, elapsed_s: float, over: bool
) -> None:
    asked = replace(setup, options=replace(setup.options, budget_s=budget_s))
    late = replace(state, started=time.monotonic() - elapsed_s)
    assert runner_of(asked, late, tmp_path).is_over is over


class Throttled(SimulatedRunner):
    """A GPU that is throttled during every third timed run, or always."""

    runs = 0
    always = False

    def run(self, spec: TrialSpec) -> TrialResult:
        result = super().run(spec)
        type(self).runs += 1
        hot = spec.kind == "train" and (self.always or type(self).runs % 3 == 0)
        if not hot:
            return result
        slower = tuple(2 * ms for ms in result.step_ms)
        return replace(result, step_ms=slower, unreliable="the GPU was throttled (power brake, 90 degrees)")


def test_trials_on_a_throttled_gpu_are_repeated(here: Path) -> None:  # noqa: F811
    class Sometimes(Throttled):
        pass

    plain = plain_search().made
    simulated, asked = script(), options(trials=4, seeds=2)
    made = Search(
        asked, ScriptCommand.parse(asked.command), Listeners(), lambda seed, _folder: Sometimes(simulated, seed)
    )
    made.run()
    notes = [note for note in made.state.notes if note.startswith("a trial is repeated")] if made.state else []
    assert 1 <= len(notes) <= 5
    assert "power brake" in notes[0]
    times = {r.name: r["step_time_ms"] for r in plain.records if r.ok and r.kind != DUEL}
    trusted = [r for r in made.records if r.ok and r.kind == "preset" and "unreliable" not in r.tags]
    assert trusted
    assert all(record["step_time_ms"] == times[record.name] for record in trusted if record.name in times)


def test_a_gpu_that_is_always_throttled_is_not_measured_twice_for_ever(here: Path) -> None:  # noqa: F811
    class Always(Throttled):
        always = True

    simulated, asked = script(), options(trials=6, seeds=2)
    made = Search(asked, ScriptCommand.parse(asked.command), Listeners(), lambda seed, _folder: Always(simulated, seed))
    made.run()
    assert made.state is not None
    assert sum(note.startswith("a trial is repeated") for note in made.state.notes) == 5
    assert any("times of this search are uncertain" in note for note in made.state.notes)
    doubtful = [record for record in made.records if "unreliable" in record.tags]
    assert doubtful
    assert all("throttled" in record.reason for record in doubtful)


def test_what_lies_between_the_two_sides_judges_although_training_does_not_move_it() -> None:
    flat = (1e-4,) * 20

    def ran(name: str) -> TrialResult:
        return TrialResult("ok", losses=flat, metric=Series(name, steps=tuple(range(20)), values=flat))

    both = baseline_of(ran("rollout_kl"), ran("rollout_kl"), [ran("rollout_kl")])
    assert both.learnt
    assert both.loss is not None
    assert (both.loss.learnt, both.loss.metric) == (False, "")
    assert not baseline_of(ran("eval"), ran("eval"), [ran("eval")]).learnt
