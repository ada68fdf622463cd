"""What is said beside a verdict: why nothing is acceptable, and why what came out faster was not taken."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from autoprec.tuning.decide.decision import Decision, Rules, Standing
from autoprec.tuning.decide.metrics import Reference
from autoprec.tuning.decide.sentences import Reason
from autoprec.tuning.phases.reasons import why_nothing, with_faster, with_unsure
from autoprec.tuning.study.run import Run


def state(objective: str = "throughput") -> Any:
    notes: list[str] = []
    return SimpleNamespace(
        reference=Reference((2.0, 1.0), 100.0, 1000, 8),
        options=SimpleNamespace(objective=objective),
        notes=notes,
        note=notes.append,
    )


@pytest.mark.parametrize(
    ("standings", "code"),
    [
        ([], "none_measured"),
        ([Standing("a", 0.9, (0.0,))], "no_gain"),
        ([Standing("a", 1.2, (0.0,))], "none_acceptable"),
        ([Standing("a", 1.2, (0.5,))], "none_acceptable"),
    ],
    ids=["nothing ran", "slower", "too few seeds", "beyond the budget"],
)
def test_why_nothing(standings: list[Standing], code: str) -> None:
    rules = Rules()
    judged = [rules.judge(one) for one in standings]
    assert why_nothing(state(), judged, rules, 2).code == code


def test_what_failed_first_is_why_nothing_was_measured() -> None:
    names = ("autocast", "all bf16")
    failed = [Run(i, "preset", name, {}, {}, "crashed", "same dtype") for i, name in enumerate(names)]
    why = why_nothing(state(), [], Rules(), 2, failed)
    assert str(why).endswith("could be measured: autocast: crashed: same dtype; nor the other")


@pytest.mark.parametrize(
    ("speedups", "objective", "memory", "code"),
    [
        ((0.87,), "throughput", 1000, "no_gain"),
        ((0.69, 0.87, 0.5), "throughput", 500, "no_gain"),
        ((1.02, 0.9), "throughput", 1000, "none_acceptable"),
        ((0.87, 0.9), "memory", 500, "none_acceptable"),
        ((0.87,), "memory", 1200, "no_gain"),
        ((0.9,), "balanced", 1100, "no_gain"),
        ((0.9,), "balanced", 500, "none_acceptable"),
    ],
)
def test_what_is_slower_by_every_trial_is_not_said_to_lack_seeds(
    speedups: tuple[float, ...], objective: str, memory: int, code: str
) -> None:
    """Speeds are over the reference of their own seed, whatever the script took when the search began."""
    standings = [Standing(f"p{i}", speed, (0.0,), memory_bytes=memory) for i, speed in enumerate(speedups)]
    why = why_nothing(state(objective), standings, Rules(), 2)
    assert why.code == code
    assert ("paired seeds that it takes" in str(why)) == (code == "none_acceptable")
    if code == "no_gain" and objective == "throughput":
        assert f"{max(speedups):.2f}x" in str(why)


@pytest.mark.parametrize(
    ("merit", "modelled", "says"),
    [
        (1.003, True, "changes nothing that counts: +0.30% modelled"),
        (1.006, False, "gains +0.6%, which is within"),
        (0.997, False, "is not better than the script as written: 1.00x, which is within"),
        (1.02, True, "1 of the 2 paired seeds"),
        (1.02, False, "1 of the 2 paired seeds"),
    ],
)
def test_a_gain_too_small_for_a_further_seed_is_said_to_be_small(merit: float, modelled: bool, says: str) -> None:
    """A search gives no further seed to what gains so little, which is why it stays."""
    assert says in str(why_nothing(state(), [Standing("a", merit, (0.0,), modelled=modelled)], Rules(), 2))


@pytest.mark.parametrize("objective", ["throughput", "memory"])
def test_what_came_out_faster_is_told_where_speed_is_what_counts(objective: str) -> None:
    books, chosen, other = state(objective), Standing("a", 1.2, (0.0, 0.0)), Standing("b", 1.5, (0.0,))
    decision = Decision("adopt", (Reason("none_measured"),), (chosen,), 0, timing_noise=0.01)
    found = with_faster(books, decision, chosen, [chosen, other], Rules(), 2)
    timed = objective == "throughput"
    assert [reason.code for reason in found.reasons[1:]] == ["faster_not_taken"] * timed
    assert list(found.not_taken) == ["b"] * timed
    assert len(books.notes) == timed


SLOW = Reason("no_gain", {"name": "autocast", "merit": 0.88, "noise": 0.1})


@pytest.mark.parametrize(
    ("others", "said"),
    [
        ([Standing("all bf16", 1.28, (0.0,))], "all bf16 came out faster (1.28x"),
        ([Standing("a", 1.2, (0.0,)), Standing("b", 1.3, (0.0,))], "b came out faster (1.30x"),
        ([Standing("all bf16", 1.28, (0.0,), low=1.2, high=1.35)], "all bf16 came out faster"),
        ([Standing("within the noise", 1.05, (0.0,))], None),
        ([Standing("beyond the budget", 1.4, (0.5,))], None),
        ([Standing("no faster beside the script", 1.28, (0.0,), low=0.9, high=1.6)], None),
        ([Standing("seeds enough", 1.28, (0.0, 0.0))], None),
        ([Standing("slower", 0.8, (0.0,))], None),
        ([], None),
    ],
    ids=lambda value: value[-1].name if isinstance(value, list) and value else "",
)
def test_what_seems_faster_under_too_few_seeds_is_told_where_nothing_gains(
    others: list[Standing], said: str | None
) -> None:
    """A table had "all bf16 (1 seed) 1.28x" above "the best acceptable policy is not better: 0.88x"."""
    decision = with_unsure(Decision("stay", (SLOW,)), [Standing("autocast", 0.88, (0.0, 0.0)), *others], Rules(), 2)
    assert decision.reasons[0] is SLOW
    told = [str(one) for one in decision.reasons[1:]]
    assert len(told) == (said is not None)
    if said is not None:
        assert told[0].startswith(said)
        assert "under 1 of the 2 paired seeds" in told[0]


def test_other_reasons_to_adopt_nothing_are_left_alone() -> None:
    decision = Decision("stay", (Reason("none_acceptable", {}),))
    assert with_unsure(decision, [Standing("a", 1.3, (0.0,))], Rules(), 2) is decision
