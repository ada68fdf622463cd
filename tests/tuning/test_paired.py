from __future__ import annotations

import contextlib
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autoprec.errors import NoSpaceError
from autoprec.trial.protocol import STEPS, TrialResult, TrialSpec
from autoprec.tuning.engine import Search
from autoprec.tuning.events import Listeners
from autoprec.tuning.paired import BEFORE_REFERENCE_S, LEAST_TIMEOUT_S, TIMED_SHARE, PairedRunner, fit_together
from autoprec.tuning.workers.local import HostPool
from tests.simulated import SimulatedRunner
from tests.tuning.test_engine import here, options, script, search  # noqa: F401


@pytest.fixture
def made(here: Path) -> Search:  # noqa: F811
    return search(script(), options(trials=2, seeds=1))[0]


def runner_of(made: Search, folder: Path) -> PairedRunner:
    assert made.setup is not None
    assert made.ledger is not None
    return PairedRunner(made.setup, HostPool(lambda seed, _: SimulatedRunner(script(), seed), folder), made.ledger)


def test_a_trial_may_stand_still_for_twenty_runs_of_the_reference(made: Search, tmp_path: Path) -> None:
    runner = runner_of(made, tmp_path)
    assert made.ledger is not None
    made.ledger.timings["reference_run_s"] = 0.5
    assert runner.trial_timeout() == LEAST_TIMEOUT_S
    made.ledger.timings["reference_run_s"] = 40.0
    assert runner.trial_timeout() == pytest.approx(800.0)
    assert runner.spec(None).timeout_s == pytest.approx(800.0)
    made.ledger.references.clear()
    assert runner.trial_timeout() == BEFORE_REFERENCE_S


def test_forked_trials_share_their_random_state_and_others_are_reseeded(made: Search, tmp_path: Path) -> None:
    runner = runner_of(made, tmp_path)
    assert runner.spec(None).seed is None
    assert runner.spec({}, steps=3, anneal=True).steps == 3
    assert runner.workers == 1


@pytest.mark.parametrize(("load", "told"), [(12.0, True), (1.0, False)])
def test_a_busy_cpu_is_told_where_steps_are_timed_on_it(
    here: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    load: float,
    told: bool,
) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (load, load, load))
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    made, _ = search(script(device="cpu"), options(space="cpu", trials=2, seeds=1))
    assert made.ledger is not None
    assert any("busy with other work (load 11.0 on 2 cores)" in note for note in made.ledger.notes) is told
    rehearsed, _ = search(script(device="cpu"), options(target="h100", trials=2, seeds=1, study="r"))
    assert rehearsed.ledger is not None
    assert not any("busy" in note for note in rehearsed.ledger.notes)


GIB = 1 << 30


def test_trials_fit_together_with_room_for_fragments_and_contexts() -> None:
    assert fit_together(2, 25 * GIB, 80 * GIB)
    assert not fit_together(3, 25 * GIB, 80 * GIB)
    assert not fit_together(2, 31 * GIB, 80 * GIB)


@pytest.mark.parametrize(
    ("asked", "host", "peak_bytes", "refused"),
    [
        (0, {}, GIB, None),
        (1, {}, GIB, None),
        (2, {}, GIB, ""),
        (2, {}, 70 * GIB, "do not fit"),
        (2, {"autotunes": True}, GIB, "max-autotune"),
        (2, {"world_size": 2}, GIB, "wait for each other"),
    ],
)
def test_trials_share_one_gpu_only_where_asked_for(
    made: Search, tmp_path: Path, asked: int, host: dict[str, Any], peak_bytes: int, refused: str | None
) -> None:
    runner = runner_of(made, tmp_path)
    setup, ledger = made.setup, made.ledger
    assert setup is not None
    assert ledger is not None
    setup = replace(setup, options=replace(setup.options, workers=asked), host=replace(setup.host, **host))
    reference = replace(ledger.reference, memory_bytes=peak_bytes)
    ledger.references[0] = reference
    runner = PairedRunner(setup, runner._pool, ledger)
    assert (refused or "") in runner.refused_sharing()
    assert bool(runner.refused_sharing()) is bool(refused)
    assert runner.shares_device is (refused == "")
    assert runner.workers == (2 if refused == "" else 1)


def test_a_gpu_in_exclusive_mode_has_one_process(made: Search, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    setup, ledger = made.setup, made.ledger
    assert setup is not None
    assert ledger is not None
    host = replace(setup.host, launch="zygote")
    pool = HostPool(lambda seed, _: SimulatedRunner(script(), seed), tmp_path)
    for mode, free in (("Default", True), ("Exclusive_Process", False), ("", True)):
        monkeypatch.setattr("autoprec.tuning.paired.ask_driver", lambda *_, mode=mode: mode)
        assert PairedRunner(replace(setup, host=host), pool, ledger).starts_ahead is free
        both = replace(setup, host=host, options=replace(setup.options, workers=2))
        assert ("exclusive" in PairedRunner(both, pool, ledger).refused_sharing()) is not free


@pytest.mark.parametrize(
    ("option", "host", "peak_bytes", "ahead"),
    [
        ({}, {}, GIB, True),
        ({"workers": 2}, {}, GIB, False),  # they share the device already
        ({"engine": "ray"}, {}, GIB, False),
        ({"at_step": 100}, {}, GIB, False),  # a start that trains
        ({}, {"launch": "process"}, GIB, False),
        ({}, {"autotunes": True}, GIB, False),
        ({}, {}, 70 * GIB, False),
    ],
)
def test_the_next_trials_process_starts_ahead_on_one_gpu_where_nothing_is_disturbed(
    made: Search, tmp_path: Path, option: dict[str, Any], host: dict[str, Any], peak_bytes: int, ahead: bool
) -> None:
    setup, ledger = made.setup, made.ledger
    assert setup is not None
    assert ledger is not None
    on_gpu = replace(setup.host, launch="zygote")
    setup = replace(setup, options=replace(setup.options, **option), host=replace(on_gpu, **host))
    reference = ledger.references[0] = replace(ledger.reference, memory_bytes=peak_bytes)
    pool = HostPool(lambda seed, _: SimulatedRunner(script(), seed), tmp_path)
    runner = PairedRunner(setup, pool, ledger)
    assert runner.starts_ahead is ahead
    ledger.references.clear()
    assert not runner.starts_ahead  # nothing is known of its memory
    ledger.references[0] = reference


class OutOfMemory(SimulatedRunner):
    """What two trials at once do on a device that is too small for them, or one policy by itself."""

    def __init__(self, *, by_itself: bool) -> None:
        super().__init__(script(), 0)
        self.by_itself, self.running, self.most, self.lock = by_itself, 0, 0, threading.Lock()
        self.both = threading.Barrier(2)

    def run(self, spec: TrialSpec) -> TrialResult:
        with self.lock:
            self.running += 1
            self.most = max(self.most, self.running)
        if not self.both.broken:
            with contextlib.suppress(threading.BrokenBarrierError):
                self.both.wait(5.0)
                self.both.abort()
            failed = True
        else:
            failed = self.by_itself
        with self.lock:
            self.running -= 1
        return TrialResult("oom") if failed else super().run(spec)


@pytest.mark.parametrize("by_itself", [True, False])
def test_trials_that_run_out_of_memory_beside_each_other_run_again_alone(
    made: Search, tmp_path: Path, by_itself: bool
) -> None:
    assert made.setup is not None
    assert made.ledger is not None
    made.ledger.notes.clear()
    host = OutOfMemory(by_itself=by_itself)
    runner = PairedRunner(made.setup, HostPool(lambda *_: host, tmp_path), made.ledger)
    spec = runner.spec({"schema": "autoprec.policy/1"}, shared=True, steps=4)
    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(runner._timed, [spec, spec], [0, 0]))
    assert [result.status for result in results] == (["oom", "oom"] if by_itself else ["ok", "ok"])
    assert host.most == 2
    assert any("one at a time" in note for note in made.ledger.notes) is not by_itself


def _asked_for(monkeypatch: pytest.MonkeyPatch) -> list[TrialSpec]:
    """Keep what simulated trials are asked for."""
    kept: list[TrialSpec] = []
    run = SimulatedRunner.run
    monkeypatch.setattr(SimulatedRunner, "run", lambda self, spec: (kept.append(spec), run(self, spec))[1])
    return kept


def test_a_timed_search_on_one_gpu_times_runs_longer_and_overlaps_trials_where_asked_to(
    here: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept = _asked_for(monkeypatch)
    monkeypatch.setattr("autoprec.tuning.paired.fit_together", lambda *_: True)
    told: list[str] = []
    monkeypatch.setattr(Listeners, "note", lambda _, text: told.append(text))
    search(script(), options(trials=3, seeds=2, steps=STEPS, workers=2))
    trials = [spec for spec in kept if spec.shared]
    assert trials
    assert all(spec.policy and spec.stop_gap for spec in trials)  # trials alone: no reference, no further seed
    assert {spec.timed_share for spec in kept if spec.kind == "train"} == {TIMED_SHARE}
    assert any("take turns" in note for note in told)
    assert any("10% of its own duration" in note for note in told)
    kept.clear()
    told.clear()
    search(script(), options(trials=2, seeds=1, study="default"))
    assert kept
    assert not any(spec.shared or spec.timed_share for spec in kept)
    assert not any("take turns" in note for note in told)


def test_a_trial_that_raises_leaves_the_device_to_others(made: Search, tmp_path: Path) -> None:
    class Full(SimulatedRunner):
        def run(self, spec: TrialSpec) -> TrialResult:
            if spec.steps == 4:
                raise NoSpaceError("no space left")
            return TrialResult("oom")

    assert made.setup is not None
    assert made.ledger is not None
    runner = PairedRunner(made.setup, HostPool(lambda *_: Full(script(), 0), tmp_path), made.ledger)
    with pytest.raises(NoSpaceError):
        runner._timed(runner.spec({"schema": "autoprec.policy/1"}, shared=True, steps=4), 0)
    failing = threading.Thread(
        target=runner._timed, args=(runner.spec({"schema": "autoprec.policy/1"}, shared=True, steps=5), 0), daemon=True
    )
    failing.start()
    failing.join(20.0)
    assert not failing.is_alive()


def test_every_trial_but_the_last_has_the_next_ones_process_started_beside_it(
    here: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept = _asked_for(monkeypatch)
    monkeypatch.setattr(PairedRunner, "starts_ahead", property(lambda _: True))
    search(script(), options(trials=3, seeds=2))
    asked = [spec.ahead for spec in kept if spec.stop_gap is not None]  # trials alone
    assert asked == [True, True, False]
    assert not any(spec.ahead for spec in kept if spec.stop_gap is None)
