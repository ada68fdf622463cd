"""Figures as people read them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autoprec.report.text import duration, verdict_lines
from autoprec.tuning.decide.sentences import Reason
from tests.tracking.conftest import make_records, make_result


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0 s"), (59, "59 s"), (150, "2 min 30 s"), (7260, "2 h 1 min"), (90_000, "1 d 1 h")]
)
def test_a_time_span_has_its_two_largest_units(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_the_verdict_comes_first_and_its_caveats_after_it() -> None:
    reasons = (Reason("cut_short", {"what": "no time"}), Reason("none_measured"), Reason("interrupted"))
    found = replace(make_result(make_records()), reasons=tuple(reason.to_json() for reason in reasons))
    first, *caveats = verdict_lines(found)
    assert (first, caveats) == (f"{reasons[0]}; so far {reasons[1]}", [str(reasons[2])])
    assert verdict_lines(replace(found, reasons=(), reason="as before")) == ["as before"]
