"""Figures as people read them."""

from __future__ import annotations

import pytest

from autoprec.report.text import duration


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0 s"), (59, "59 s"), (150, "2 min 30 s"), (7260, "2 h 1 min"), (90_000, "1 d 1 h")]
)
def test_a_time_span_has_its_two_largest_units(seconds: float, text: str) -> None:
    assert duration(seconds) == text
