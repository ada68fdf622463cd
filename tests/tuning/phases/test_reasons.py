"""What is said beside a verdict: why nothing is acceptable, and why what came out faster was not taken."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from autoprec.tuning.decide.decision import Decision, Rules, Standing
from autoprec.tuning.decide.metrics import Reference
from autoprec.tuning.decide.sentences import Reason
from autoprec.tuning.phases.reasons import why_nothing, with_faster


def state(objective: str = "throughput") -> Any:
    notes: list[str] = []
    return SimpleNamespace(
        reference=Reference((2.0, 1.0), 100.0, 1000, 8),
        options=SimpleNamespace(objective=objective),
        notes=notes,
        note=notes.append,
    )


@pytest.mark.parametrize(
    ("standings", "ms", "code"),
    [
        ([], 0.0, "none_measured"),
        ([Standing("a", 0.9, (0.0,))], 110.0, "no_gain"),
        ([Standing("a", 1.2, (0.0,))], 80.0, "none_acceptable"),
        ([Standing("a", 1.2, (0.5,))], 80.0, "none_acceptable"),
    ],
    ids=["nothing ran", "slower", "too few seeds", "beyond the budget"],
)
def test_why_nothing(standings: list[Standing], ms: float, code: str) -> None:
    rules = Rules()
    judged = [rules.judge(one) for one in standings]
    assert why_nothing(state(), judged, {"a": ms}, rules, 2).code == code


@pytest.mark.parametrize("objective", ["throughput", "memory"])
def test_what_came_out_faster_is_told_where_speed_is_what_counts(objective: str) -> None:
    books, chosen, other = state(objective), Standing("a", 1.2, (0.0, 0.0)), Standing("b", 1.5, (0.0,))
    decision = Decision("adopt", (Reason("none_measured"),), (chosen,), 0, timing_noise=0.01)
    found = with_faster(books, decision, chosen, [chosen, other], Rules(), 2)
    timed = objective == "throughput"
    assert [reason.code for reason in found.reasons[1:]] == ["faster_not_taken"] * timed
    assert list(found.not_taken) == ["b"] * timed
    assert len(books.notes) == timed
