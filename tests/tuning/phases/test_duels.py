"""The speed of what decides comes from a duel: what is timed there, when, and what of it is stored."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from autoprec.policy import load_policy
from autoprec.trial.command import ScriptCommand
from autoprec.trial.intervals import FEWEST
from autoprec.trial.protocol import DuelRounds, DuelSpec, TrainSpec, TrialResult
from autoprec.tuning.engine import Search
from autoprec.tuning.events import Listeners
from autoprec.tuning.phases import duels
from autoprec.tuning.phases.duels import PROCESS_SD, Duels, duel_run, half_width
from autoprec.tuning.state import SearchState, Seconds
from autoprec.tuning.study.run import DUEL, Metric, Run, metrics_of, pooled
from autoprec.tuning.timing import in_turns
from tests.simulated import SimulatedRunner, SimulatedScript
from tests.tuning.test_engine import here, options, search  # noqa: F401


@pytest.fixture(autouse=True)
def with_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let any CPU multiply bf16: these searches are simulated."""
    monkeypatch.setattr("autoprec.precision.hardware.cpu_bf16_units", lambda: ("AVX512-BF16",))


def test_what_is_adopted_was_timed_in_a_duel_and_says_its_interval(
    here: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    simulated, told = SimulatedScript(), list[tuple[str, str]]()
    monkeypatch.setattr(Listeners, "phase", lambda _self, name, detail="": told.append((name, detail)))
    made, result = search(simulated, options(target="cpu", space="cpu", trials=6))
    assert result.verdict == "adopt"
    duels = {run.name: run for run in made.records if run.kind == DUEL}
    assert {"bf16 autocast", "all bf16"} & duels.keys(), "the best that people write by hand"
    assert result.best["name"] in duels
    assert any(name == "duel" and result.best["name"] in detail for name, detail in told), "it may take minutes"
    kinds = [
        spec.kind if spec.kind != "train" else ("policy" if spec.policy else "script") for _, spec in simulated.calls
    ]
    assert kinds.index("duel") > kinds.index("policy")
    assert all(run.metrics["speedup"].low is not None for run in duels.values())


def test_speeds_are_said_of_a_duel_as_they_are_elsewhere(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """It was "trial 5 2.3x [2.2, 2.4]" where every other line has "2.30x [2.20, 2.40]"."""
    notes: list[str] = []
    monkeypatch.setattr(Listeners, "note", lambda _self, text: notes.append(text))
    monkeypatch.setattr(duels, "median_interval", lambda _ratios: (2.3, 2.2, 2.4))
    search(SimulatedScript(), options(target="cpu", space="cpu", trials=6))
    assert any("bf16 autocast 2.30x [2.20, 2.40]" in note for note in notes)


def test_the_first_trials_are_what_people_write_by_hand(here: Path) -> None:  # noqa: F811
    made, _ = search(SimulatedScript(), options(target="h100", trials=8))
    first = sorted((run for run in made.records if run.kind in ("preset", "search")), key=lambda run: run.number)[:5]
    defaults = [f"published:{name}" for name in ("torchao-rowwise-gw-hp", "te-delayed", "te-current")]
    assert [run.name for run in first] == ["all bf16", "all fp8_tensorwise", *defaults]


def test_a_rehearsal_times_nothing(here: Path) -> None:  # noqa: F811
    simulated = SimulatedScript()
    search(simulated, options(target="h100", trials=4))
    assert all(spec.kind != "duel" for _, spec in simulated.calls)


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


def rounds_of(result: TrialResult) -> tuple[dict[str, float], ...]:
    assert isinstance(result.answer, DuelRounds)
    return result.answer.rounds


def on_a_clock(monkeypatch: pytest.MonkeyPatch, simulated: SimulatedScript, *, step_s: float, duel_s: float) -> None:
    """Let a search's seconds be what its runs would take: 23 steps each, a duel as much as it needs and is given."""

    real = SimulatedRunner._duel

    def elapsed(_state: SearchState) -> float:
        runs = [spec for _, spec in simulated.calls]
        return sum(
            min(spec.within_s or 0.0, duel_s * len(spec.probes))
            if isinstance(spec, DuelSpec)
            else step_s * (8 if spec.steps == in_turns.STEPS_APART else 23)
            if isinstance(spec, TrainSpec)
            else 0.0
            for spec in runs
        )

    def duel(runner: SimulatedRunner, spec: DuelSpec) -> TrialResult:
        done, share = real(runner, spec), (spec.within_s or 0.0) / (duel_s * len(spec.probes))
        return replace(done, answer=DuelRounds(rounds_of(done)[: int(FEWEST * share + 1e-3)], steps=8))

    monkeypatch.setattr(SimulatedRunner, "_duel", duel)
    monkeypatch.setattr(in_turns, "PROCESSES", 1)
    monkeypatch.setattr(SearchState, "elapsed", elapsed)
    monkeypatch.setattr(SearchState, "seconds_to_close", lambda _state: 5.0)
    monkeypatch.setattr(SearchState, "seconds_per_seed", lambda *_: 2 * 23 * step_s)
    monkeypatch.setattr(SearchState, "seconds_per_run", lambda _state: 23 * step_s)
    monkeypatch.setattr(Duels, "_least_s", lambda _duels, count, _by_block: duel_s * count)
    monkeypatch.setattr(Duels, "_block_s", lambda _duels: 0.0)
    monkeypatch.setattr(Duels, "_whole_runs_s", lambda _duels, count: FEWEST * (count + 1) * 8 * step_s)


@pytest.mark.parametrize("budget_s", [90.0, 100.0, 110.0, 150.0, 230.0])
def test_a_budget_keeps_time_for_a_duel_of_what_is_adopted(
    here: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    budget_s: float,
) -> None:
    """Runs take 11.5 s: the reference 34.5 s, what people write by hand 23 s, a second seed 23 s; a duel 15 s."""
    simulated = SimulatedScript()
    on_a_clock(monkeypatch, simulated, step_s=0.5, duel_s=15.0)
    made, result = search(simulated, options(target="cpu", space="cpu", trials=30, budget_s=budget_s))
    assert result.verdict == "adopt"
    assert "speedup" in result.best["intervals"], "what is adopted was timed beside the script"
    assert "not timed" not in result.reason
    assert made.state is not None
    assert made.state.elapsed() + 5.0 <= 1.25 * budget_s + 0.5


def test_without_time_for_a_duel_a_speed_is_said_to_be_that_of_trials(
    here: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    simulated = SimulatedScript()
    on_a_clock(monkeypatch, simulated, step_s=0.5, duel_s=15.0)
    made, result = search(simulated, options(target="cpu", space="cpu", trials=30, budget_s=80.0))
    assert result.verdict == "adopt"
    assert not any(spec.kind == "duel" for _, spec in simulated.calls)
    assert "x by its own trials, not timed beside the script, divergence" in result.reason
    assert "no time to time the policies beside each other" in result.cut_short
    assert made.state is not None
    assert made.state.elapsed() + 5.0 <= 1.25 * 80.0 + 0.5


def noisy_duels(patch: pytest.MonkeyPatch, spread: list[float], luck: float = 1.0) -> list[float]:
    """Let rounds of a duel differ by ``spread``, and the first duel favour policies; return the seconds of each."""
    real = SimulatedRunner._duel
    within: list[float] = []

    def duel(runner: SimulatedRunner, spec: DuelSpec) -> TrialResult:
        within.append(spec.within_s or 0.0)
        rounds = rounds_of(real(runner, spec))
        lucky = luck if len(within) == 1 else 1.0
        noisy = tuple(
            {who: ms / (scale * lucky if who else 1.0) for who, ms in r.items()}
            for r, scale in zip(rounds, spread, strict=True)
        )
        return TrialResult("ok", answer=DuelRounds(noisy, steps=8))

    patch.setattr(SimulatedRunner, "_duel", duel)
    return within


def test_what_was_picked_is_timed_once_more_and_all_its_rounds_count(
    here: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A lucky duel makes what it favours 12 % faster than it is; the next one of that does not."""
    within = noisy_duels(monkeypatch, [0.9, 0.95, 1.0, 1.0, 1.0, 1.0, 1.05, 1.1], luck=1.12)
    made, result = search(SimulatedScript(), options(target="cpu", space="cpu", trials=6))
    assert result.verdict == "adopt"
    first, second, *more = (run for run in made.records if run.kind == DUEL and run.name == result.best["name"])
    assert 1.04 < first["speedup"] / second["speedup"] < 1.08, "half of the luck is gone"
    assert result.best["speedup"] == pytest.approx([second, *more][-1]["speedup"])
    assert max(within) == pytest.approx(duels.AGAIN_S, abs=1.0), "longer than the first duel had"


def test_what_is_known_within_nine_percent_is_timed_until_it_is_known_better(
    here: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Autocast was the fastest of three, 2.11x [1.92, 2.28], and is 1.87x from outside."""
    noisy_duels(monkeypatch, [0.8, 0.85, 0.95, 1.0, 1.0, 1.05, 1.15, 1.2])
    made, result = search(SimulatedScript(), options(target="cpu", space="cpu", trials=6))
    assert len([run for run in made.records if run.kind == DUEL and run.name == result.best["name"]]) > 2


def test_duels_of_a_session_that_was_killed_count(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """A search that was killed every 50 s timed the same rough interval again in each of its sessions."""
    noisy_duels(monkeypatch, [0.8, 0.85, 0.95, 1.0, 1.0, 1.05, 1.15, 1.2])
    made, result = search(SimulatedScript(), options(target="cpu", space="cpu", trials=6))
    own = [run for run in made.records if run.kind == DUEL and run.name == result.best["name"]]
    state = SimpleNamespace(store=SimpleNamespace(records=own[-1:] * (1 + duels._MOST_AGAIN)), seconds=None)
    host = SimpleNamespace(compiled=False)
    setup, runner = SimpleNamespace(measured=True, host=host), SimpleNamespace(by_block=SimpleNamespace(active=False))
    again = Duels(setup, runner, state)
    assert not again.time_again(own[-1:], ())
    assert again._again == {result.best["name"]: duels._MOST_AGAIN}
    fresh = SimpleNamespace(store=SimpleNamespace(records=own[:1]), seconds=None)
    assert not Duels(setup, runner, fresh)._again, "its first duel is none that was done again"


@pytest.mark.parametrize(
    ("compiled", "half", "often"), [(False, 0.03, 1), (False, 0.06, 3), (True, 0.03, 0), (True, 0.06, 1)]
)
def test_what_compiles_in_each_block_is_timed_again_once_and_only_if_rough(
    monkeypatch: pytest.MonkeyPatch, compiled: bool, half: float, often: int
) -> None:
    """A search of a compiled script took 13 minutes, 8 of them in four duels of the same policies."""
    known = Run(0, DUEL, "a", {}, {}, "ok", metrics={"speedup": Metric(2.0, low=2 - 2 * half, high=2 + 2 * half)})
    host = SimpleNamespace(compiled=compiled)
    state = SimpleNamespace(store=SimpleNamespace(records=[known]))
    made: Any = Duels(SimpleNamespace(measured=True, host=host), SimpleNamespace(), state)  # type: ignore[arg-type]
    monkeypatch.setattr(Duels, "_can_fork", lambda *_: True)
    monkeypatch.setattr(Duels, "_seconds", lambda *_, **__: 40.0)
    monkeypatch.setattr(Duels, "_time", lambda *_, **__: True)
    assert [made.time_again([known], ()) for _ in range(4)] == [True] * often + [False] * (4 - often)


def test_what_is_written_by_hand_is_timed_beside_the_answer_where_a_busy_minute_made_its_trial_slow(
    here: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Autocast is a tenth faster than all else, and by its trials a fifth slower."""
    real = SimulatedRunner._train

    def train(runner: SimulatedRunner, spec: TrainSpec, *, in_duel: bool = False) -> TrialResult:
        done, policy = real(runner, spec), spec.policy or {}
        if policy.get("activations", "keep") == "keep" or policy.get("layers"):
            return done
        factor = 0.9 if in_duel else 1.2
        return replace(done, step_ms=tuple(factor * ms for ms in done.step_ms))

    monkeypatch.setattr(SimulatedRunner, "_train", train)
    made, result = search(SimulatedScript(), options(target="cpu", space="cpu", trials=6))
    assert "bf16 autocast" in {run.name for run in made.records if run.kind == DUEL}
    assert result.best["name"] == "bf16 autocast"


def test_what_one_process_says_of_a_speed_is_as_uncertain_as_processes_differ(
    here: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A compiled script was claimed to gain 1.65x [1.61, 1.67]; five processes of it gained 1.64x to 1.77x."""
    times = [(100.0 + number % 2, 50.0) for number in range(12)]
    assert half_width(duel_run("a", {}, times, 100.0)) < 0.01
    assert half_width(duel_run("a", {}, times, 100.0, PROCESS_SD)) == pytest.approx(2 * PROCESS_SD, rel=0.05)
    monkeypatch.setattr(Duels, "_can_fork", lambda *_: False)
    made, _ = search(SimulatedScript(), options(target="cpu", space="cpu", trials=6))
    assert all(half_width(run) >= 2 * PROCESS_SD for run in made.records if run.kind == DUEL)


def test_what_is_known_well_is_not_timed_again(here: Path) -> None:  # noqa: F811
    made, result = search(SimulatedScript(), options(target="cpu", space="cpu", trials=6))
    assert len([run for run in made.records if run.kind == DUEL and run.name == result.best["name"]]) == 1


def test_to_stay_is_sure_only_where_what_people_write_was_timed_well_enough(
    here: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By hand is as fast as the script in the middle, and up to 10 % faster or slower: that is timed once more."""
    spread = [0.9, 0.95, 1.0, 1.0, 1.0, 1.0, 1.05, 1.1]

    def duel(runner: SimulatedRunner, spec: DuelSpec) -> TrialResult:
        names = ["", *(probe.id for probe in spec.probes)]
        rounds = tuple({who: 10.0 * (scale if who else 1.0) for who in names} for scale in spread)
        return TrialResult("ok", answer=DuelRounds(rounds, steps=8))

    monkeypatch.setattr(SimulatedRunner, "_duel", duel)
    made, result = search(SimulatedScript(), options(target="cpu", space="cpu", trials=6))
    assert result.verdict == "stay"
    known = [run.name for run in made.records if run.kind == DUEL]
    assert any(known.count(name) == 2 for name in ("bf16 autocast", "all bf16"))


@pytest.mark.parametrize(
    ("free", "execution", "launch", "cached_s", "can"),
    [
        (300, "keep", "fork", None, True),
        (150, "keep", "fork", None, False),  # another model would take more than half of it
        (None, "keep", "fork", None, False),  # macOS does not say
        (300, "compile", "fork", None, False),
        (300, "compile_whole", "fork", None, False),
        (300, "eager", "fork", None, True),  # of a script that compiles nothing
        (300, "keep", "process", None, False),
        (300, "keep", "fork", 3.0, True),  # of one that compiles its model
        (300, "keep", "fork", 30.0, False),
    ],
)
def test_contenders_have_processes_where_memory_that_can_be_had_holds_them(
    monkeypatch: pytest.MonkeyPatch, free: int | None, execution: str, launch: str, cached_s: float | None, can: bool
) -> None:
    monkeypatch.setattr("autoprec.tuning.paired.free_bytes", lambda: free)
    seconds = Seconds(cached_compile_s=cached_s)
    made: Any = SimpleNamespace(
        _state=SimpleNamespace(reference=SimpleNamespace(memory_bytes=100), seconds=seconds),
        _setup=SimpleNamespace(host=SimpleNamespace(launch=launch, compiled=cached_s is not None)),
    )
    assert Duels._can_fork(made, [Run(0, DUEL, "a", {}, {"execution": execution}, "ok")]) is can


@pytest.mark.parametrize(
    ("compiled", "forks", "free", "cores", "processes"),
    [
        (True, True, 500, 2, 3),
        (True, True, 300, 2, 2),
        (True, True, 500, 1, 2),
        (False, True, 500, 2, 2),
        (True, False, 500, 2, 1),
    ],
)
def test_two_contenders_compile_at_once_where_cores_and_memory_allow_it(
    monkeypatch: pytest.MonkeyPatch, compiled: bool, forks: bool, free: int, cores: int, processes: int
) -> None:
    monkeypatch.setattr("autoprec.tuning.paired.free_bytes", lambda: free)
    monkeypatch.setattr("autoprec.tuning.phases.duels.cores", lambda: cores)
    made: Any = SimpleNamespace(
        _state=SimpleNamespace(reference=SimpleNamespace(memory_bytes=100)),
        _setup=SimpleNamespace(
            host=SimpleNamespace(compiled=compiled),
            options=SimpleNamespace(budget_s=None),
            reference_policy=lambda: None,
        ),
        _runner=SimpleNamespace(duel_spec=lambda *_, **__: DuelSpec()),
        _ends_after=None,
    )
    assert Duels._spec(made, forks=forks, by_block=False).side_by_side == processes


class Elsewhere(SimulatedRunner):
    """A script too short for a duel, whose trials ran beside another load than its reference did: all seem slow.

    Runs of the script as written take twice as long before the first policy is tried.
    """

    blocks = 0
    tried: ClassVar[bool] = False

    def _duel(self, spec: DuelSpec) -> TrialResult:
        done = super()._duel(spec)
        return replace(done, answer=DuelRounds(rounds_of(done)[: self.blocks], steps=12))

    def _train(self, spec: TrainSpec, *, in_duel: bool = False) -> TrialResult:
        result = super()._train(spec, in_duel=in_duel)
        type(self).tried = self.tried or spec.policy is not None
        return result if self.tried else replace(result, step_ms=tuple(2 * ms for ms in result.step_ms))


@pytest.mark.parametrize("fails", [False, True], ids=["too short", "fails"])
@pytest.mark.parametrize("sampler", ["knapsack", "random"])
def test_where_no_duel_has_an_interval_what_is_adopted_was_timed_in_whole_runs(
    here: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    sampler: str,
    fails: bool,
) -> None:
    """The reference was timed in the session before, at another load: 2.31x was claimed of 1.75x."""
    if fails:
        monkeypatch.setattr(Elsewhere, "_duel", lambda *_: TrialResult("oom", "two models"))
    monkeypatch.setattr(Elsewhere, "tried", False)
    simulated, asked = SimulatedScript(), options(target="cpu", space="cpu", trials=6, sampler=sampler)
    made = Search(asked, ScriptCommand.parse(asked.command), Listeners(), lambda seed, _: Elsewhere(simulated, seed))
    result = made.run()
    assert result.verdict == "adopt"
    assert "not timed" not in result.reason
    policy = load_policy(result.policy).to_dict()
    expected = simulated.milliseconds(None) / simulated.milliseconds(policy)
    assert result.best["speedup"] == pytest.approx(expected)
    assert result.best["intervals"]["speedup"] == pytest.approx([expected, expected])
    told = "a duel failed: oom: two models" if fails else "a duel had 0 rounds, and an interval takes 6"
    assert told in " ".join(result.notes)


def test_where_whole_runs_fail_as_well_that_is_said(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    real = SimulatedRunner._train

    def train(runner: SimulatedRunner, spec: TrainSpec, *, in_duel: bool = False) -> TrialResult:
        short = spec.steps == in_turns.STEPS_APART and not in_duel
        return TrialResult("crashed", "no") if short else real(runner, spec, in_duel=in_duel)

    monkeypatch.setattr(SimulatedRunner, "_duel", lambda *_: TrialResult("oom", "two models"))
    monkeypatch.setattr(SimulatedRunner, "_train", train)
    _, result = search(SimulatedScript(), options(target="cpu", space="cpu", trials=6))
    assert "not timed beside the script" in result.reason
    assert any(note.startswith("no speed of ") for note in result.notes)


@pytest.mark.parametrize(
    ("by_block", "trials_by_block", "cached_s", "seconds"),
    [
        (True, True, 3.0, 4 * 3.0 / 6),
        (False, True, 6.0, 2 * 6.0 + 2 * 40.0),
        (False, False, 6.0, 4 * 6.0),
        (False, True, 3.0, 2 * 40.0),  # each block reads what it compiles from the cache, and has time for it
        (False, False, 3.0, 0.0),
    ],
)
def test_what_a_duel_compiles_is_what_no_trial_compiled_before(
    monkeypatch: pytest.MonkeyPatch, by_block: bool, trials_by_block: bool, cached_s: float, seconds: float
) -> None:
    """Three policies and the reference: blocks, and whole models after trials by block or of whole models."""
    monkeypatch.setattr("autoprec.tuning.paired.free_bytes", lambda: 1 << 30)
    made: Any = object.__new__(Duels)
    made._setup = SimpleNamespace(host=SimpleNamespace(blocks=6, compiled=True, launch="fork"))
    known = Seconds(compile_s=40.0, cached_compile_s=cached_s)
    made._state = SimpleNamespace(seconds=known, reference=SimpleNamespace(memory_bytes=100))
    made._runner = SimpleNamespace(by_block=SimpleNamespace(active=trials_by_block))
    assert made._compile_s(3, by_block) == pytest.approx(seconds)


def test_who_is_asked_for_twice_is_in_a_duel_once() -> None:
    """All bf16 was the best by hand and the best preset, and took two of four places."""
    one, two, three = (Run(n, "search", name, {}, {}, "ok") for n, name in enumerate(("one", "all bf16", "three")))
    assert duels._beside([one], [two, two, three], 3) == [one, two, three]
    assert duels._beside([], [two], 3) == []
