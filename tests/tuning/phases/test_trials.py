from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autoprec.policy import load_policy
from autoprec.tuning.decide.sampler.sampler import PrecisionSampler
from autoprec.tuning.phases import finalists
from autoprec.tuning.sixteen_bit import NAMES
from autoprec.tuning.study.run import Metric
from tests.simulated import SimulatedScript
from tests.tuning.test_engine import here, options, plain_search, script, search  # noqa: F401


def test_a_search_cut_short_never_says_stay(here: Path) -> None:  # noqa: F811
    """Every policy fails its divergence, and the time runs out: nothing can be said, and no policy is written."""
    simulated = script(delay_s=0.05, error_scale=300.0)
    made, result = search(
        simulated, options(trials=400, budget_s=3.0, seeds=2, max_gradient_error=1e9, sampler="random")
    )
    assert result.verdict == "undecided"
    assert "time budget of 3 s" in result.cut_short
    assert result.cut_short in result.reason
    assert result.resume.startswith("autoprec search --resume")
    assert result.policy == ""
    assert not (here / "policy.yaml").exists()
    assert any("time budget" in note for note in made.state.notes) if made.state else False


def test_what_was_cut_short_says_so_in_the_policy(here: Path) -> None:  # noqa: F811
    _, result = search(script(delay_s=0.05), options(trials=400, budget_s=4.0, seeds=2, sampler="random"))
    assert result.verdict == "adopt"
    assert "cut short: " in result.reason
    assert "of 400" in load_policy(here / result.policy).evidence["cut_short"]


def test_a_search_that_ends_by_itself_was_not_cut_short() -> None:
    result = plain_search().result
    assert (result.cut_short, result.resume) == ("", "")


def test_a_budget_that_the_setup_has_used_up_ends_the_search_without_an_answer(here: Path) -> None:  # noqa: F811
    made, result = search(script(delay_s=0.02), options(trials=30, budget_s=0.01, seeds=2, study="mine"))
    assert [record for record in made.records if record.kind in ("preset", "search")] == []
    assert result.verdict == "undecided", "nothing is said before what people write by hand has run"
    assert result.cut_short
    assert "--budget 0.01s" not in result.resume
    assert made.options.with_budget_for(made.state.needed_s).budget_s >= 60 if made.state else False
    again, _ = search(script(), options(trials=2, budget_s=60.0, seeds=2, study="mine", resume=True))
    assert any(record.name in NAMES for record in again.records)


def test_what_had_no_time_is_not_held_against_a_policy(here: Path) -> None:  # noqa: F811
    def late(policy: object) -> tuple[str, str] | None:
        return ("out_of_time", "a step takes 14 s") if policy else None

    made, result = search(script(fail=late), options(trials=6, budget_s=30.0))
    assert not [record for record in made.records if record.status == "out_of_time"]
    assert (result.verdict, bool(result.cut_short)) == ("undecided", True)


def test_nothing_is_kept_for_finalists_that_do_not_exist() -> None:
    from types import SimpleNamespace

    from autoprec.tuning.phases.trials import reserve

    made = plain_search().made
    assert made.setup is not None
    assert made.state is not None
    setup = replace(made.setup, options=replace(made.setup.options, budget_s=100.0))
    for fewest, kept in ((2, 2.0), (4, 6.0)):  # where the loss cannot judge, all seeds are run
        allocation: Any = SimpleNamespace(seed_s=2.0, fewest=fewest)
        assert reserve(setup, allocation, made.state) == kept
    nothing: Any = SimpleNamespace(acceptable_ones=list)
    assert reserve(setup, allocation, nothing) == 0.0
    best = made.state.acceptable_ones()[0]
    slower: Any = SimpleNamespace(acceptable_ones=lambda: [best.with_metrics({"speedup": Metric(0.9)})])
    assert reserve(setup, allocation, slower) == 0.0  # bf16 at 0.9x once left a third of a budget unused


def test_what_was_cut_short_has_not_converged() -> None:
    from types import SimpleNamespace

    from autoprec.tuning.phases.trials import _Loop

    told: list[str] = []
    state: Any = SimpleNamespace(cut_short=[], end=told.append)
    loop: Any = SimpleNamespace(
        state=state,
        done=3,
        goal=6,
        used_up=False,
        best_untried_value=lambda: 0.0,
        sampler=object.__new__(PrecisionSampler),
    )
    loop.sampler.finished = lambda _study: "nothing is worth it"
    state.store = SimpleNamespace(live=None)
    for cut in ([], ["the time budget ended the gradient errors"]):
        state.cut_short = cut
        _Loop.conclude(loop)
    assert told == [f"{word} after 3 of 6 trials: nothing is worth it" for word in ("converged", "ended")]


@pytest.mark.parametrize(
    ("elapsed", "speedup", "accepted", "over"),
    [
        (1109.0, 1.75, (), True),  # 240 s of a trial and 600 s of a seed do not fit into 1800 s
        (900.0, 1.75, (), False),  # they do
        (1109.0, 0.9, (), False),  # nothing may be adopted so far, so that no seed is due
        (1109.0, 1.75, (0,), False),  # it had its seed
        (1501.0, 1.75, (0,), True),
        (1501.0, 0.9, (), True),
    ],
)
def test_what_is_written_by_hand_leaves_time_for_the_seed_of_what_is_faster(
    elapsed: float, speedup: float, accepted: tuple[int, ...], over: bool
) -> None:
    """A search of two ranks spent its last 7 of 25 minutes on compiled blocks; autocast at 1.75x had one seed."""
    from types import SimpleNamespace

    from autoprec.tuning.phases.trials import _Loop

    made = plain_search().made
    assert made.setup is not None
    assert made.state is not None
    setup = replace(made.setup, options=replace(made.setup.options, budget_s=1500.0))
    best = made.state.acceptable_ones()[0].with_metrics({"speedup": Metric(speedup)})
    state: Any = SimpleNamespace(
        acceptable_ones=lambda: [best], elapsed=lambda: elapsed, seconds_per_run=lambda: 240.0, whole=None
    )
    allocation: Any = SimpleNamespace(seed_s=600.0, fewest=2, now=SimpleNamespace(accepted=accepted))
    loop: Any = SimpleNamespace(setup=setup, state=state, allocation=allocation, by_hand=frozenset({1}), seen={})
    assert _Loop.out_of_time(loop) is over


def test_a_search_out_of_time_says_so_once() -> None:
    """The time budget ended the trials in one note, and the search ran out of time in the next."""
    from types import SimpleNamespace

    from autoprec.tuning.phases.trials import _Loop

    told: list[str] = []
    state: Any = SimpleNamespace(cut=told.append, end=told.append, ended="")
    allocation = SimpleNamespace(seedless=False)
    setup = SimpleNamespace(options=SimpleNamespace(budget_s=300.0))
    loop: Any = SimpleNamespace(
        state=state, setup=setup, done=2, goal=8, best_untried_value=lambda: 0.1, allocation=allocation
    )
    _Loop.conclude(loop)
    assert told == ["the time budget of 300 s ended the trials after 2 of 8 trials"]
    assert state.ended == "ran out of time after 2 of 8 trials"


def test_a_study_that_holds_more_trials_than_it_is_allowed_says_so(here: Path) -> None:  # noqa: F811
    from types import SimpleNamespace

    from autoprec.tuning.phases.duels import usual_search_s
    from autoprec.tuning.phases.trials import seconds_left
    from autoprec.tuning.schedule import TIMED_TRIALS

    search(script(), options(study="mine", sampler="random", trials=3, seeds=1))
    made, result = search(script(), options(study="mine", sampler="random", trials=2, seeds=1, resume=True))
    assert result.stopped == "ran the 2 trials that it was allowed"
    assert made.setup is not None
    assert made.state is not None
    allocation: Any = SimpleNamespace(seed_s=2.0, fewest=2)
    runner: Any = SimpleNamespace(workers=1)
    setups = [replace(made.setup, options=replace(made.options, trials=trials)) for trials in (2, 3)]
    more, same = (seconds_left(setup, runner, made.state, allocation) for setup in setups)
    assert more == same > 0.0  # trials that are not run take nothing from what is

    def left(**seconds: float) -> float:
        for name, value in seconds.items():
            setattr(made.state.seconds, name, value)
        return seconds_left(setups[0], runner, made.state, allocation)

    assert left(duels_s=1e6, cached_compile_s=0.0) < left(duels_s=0.0) < left(cached_compile_s=2.0)
    assert left(duels_s=usual_search_s(2.0)) == left(duels_s=1e6)  # duels that take longer are not announced
    # of a hundred trials that are allowed a search usually runs ten, but may run all in a time budget
    knapsack, learned = replace(made.options, sampler="knapsack", trials=100), len(made.state.store.learned())
    usual = seconds_left(replace(made.setup, options=knapsack), runner, made.state, allocation) - left()
    assert usual == pytest.approx((TIMED_TRIALS - learned) * made.state.seconds_per_run(), rel=0.05)
    most = replace(made.setup, options=replace(knapsack, budget_s=1e6))
    assert seconds_left(most, runner, made.state, allocation) > left() + 90 * made.state.seconds_per_run()


def test_a_trial_is_ended_early_only_beyond_what_the_budget_and_the_noise_forgive() -> None:
    from types import SimpleNamespace

    from autoprec.tuning.phases.trials import hopeless_gap

    setup: Any = SimpleNamespace(options=SimpleNamespace(tolerance=0.0025))
    state: Any = SimpleNamespace(reference=SimpleNamespace(noise_floor=0.001))
    assert hopeless_gap(setup, state) == 20 * 0.0025
    state.reference.noise_floor = 0.01
    assert hopeless_gap(setup, state) == 10 * 0.01


def test_a_search_in_which_nothing_can_run_any_more_ends(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """A seed was worth more than a trial, and only a trial had time: the phases were begun anew until the end."""
    ranked = finalists.rank

    def seeds_first(*args: Any, **options: Any) -> Any:
        return replace(ranked(*args, **options), next=0, gain=1e9)

    def no_time(allocation: Any) -> bool:
        begun.append(allocation)
        return True

    begun: list[Any] = []
    monkeypatch.setattr(finalists, "rank", seeds_first)
    monkeypatch.setattr(finalists.SeedAllocation, "_must_end", no_time)
    _, result = search(SimulatedScript(), options(target="cpu", space="cpu", trials=30, budget_s=60.0))
    assert len(begun) <= 4
    assert result.cut_short
