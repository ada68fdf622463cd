from __future__ import annotations

import pytest

from autoprec.cost.planning import payback


def test_payback_counts_what_the_search_costs() -> None:
    found = payback(100.0, 1.25)
    assert found.search_s > 60
    assert found.saved_ms_per_step == pytest.approx(20.0)
    assert found.steps == pytest.approx(found.search_s / 0.02)
    assert found.hours == pytest.approx(found.steps * 0.08 / 3600)
    assert payback(100.0, 1.000003).to_json()["steps"] is None, "nobody trains for 100 million steps"
    never = payback(100.0, 1.0)
    assert never.steps == float("inf")
    assert never.to_json()["steps"] is None
    assert payback(100.0, 1.25, 1.0).steps == float("inf")  # the script as written is that much faster than bf16
    assert payback(100.0, 1.25, 2.0) == found
    assert payback(100.0, 1.25, 1.1).saved_ms_per_step == pytest.approx(8.0)
