"""Figures as people read them."""

from __future__ import annotations

from dataclasses import replace

from autoprec.reports.text import verdict_lines
from autoprec.tuning.decide.sentences import Reason
from tests.tracking.conftest import make_records, make_result


def test_the_verdict_comes_first_and_its_caveats_after_it() -> None:
    reasons = (Reason("none_measured"), Reason("cut_short", {"what": ["no time"]}), Reason("interrupted"))
    found = replace(make_result(make_records()), reasons=tuple(reason.to_json() for reason in reasons))
    first, *caveats = verdict_lines(found)
    assert (first, caveats) == (str(reasons[0]), [str(one) for one in reasons[1:]])
    assert verdict_lines(replace(found, reasons=(), reason="nothing else is known")) == ["nothing else is known"]
