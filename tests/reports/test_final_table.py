"""The final table, as a terminal prints it, and the figures that the pages have beside it."""

from __future__ import annotations

import io
from dataclasses import replace

from rich.console import Console

from autoprec.reports.html import html_report
from autoprec.tuning.study.records import SearchResult
from autoprec.tuning.study.run import Run
from tests.reports.conftest import rehearsal


def _terminal(result: SearchResult, _records: list[Run], width: int = 120) -> str:
    out = io.StringIO()
    Console(file=out, width=width, no_color=True).print(result.table().rich())
    return out.getvalue()


def test_the_terminal_table_has_policy_reference_presets_and_confidence(
    result: SearchResult, records: list[Run]
) -> None:
    text = _terminal(result, records)
    for part in ("the policy", "2.50x", "0.060 ± 0.020 %", "preset 2", "noise floor 0.040 %", "measured"):
        assert part in text


def test_the_limit_of_gradient_errors_is_told_in_both_units() -> None:
    """The table has them in percent of the gradient, --max-gradient-error is in units of its noise."""
    result, records = rehearsal()
    told = "gradient error at most 6 % (0.12 of the noise)"
    assert told in " ".join(_terminal(result, records, 200).split())
    assert told in html_report(result, records)


def test_what_was_predicted_and_how_often_a_policy_ran_is_told() -> None:
    """One run of a preset stood beside the mean of four seeds, a predicted gradient error beside a measured one."""
    result, records = rehearsal()
    rows = tuple({**row, "seeds": 1, "gradient_error": 0.0027} for row in result.presets)
    measured = _terminal(replace(result, presets=rows), records, 200)
    assert "(1 seed)" in measured
    assert "predicted" not in measured
    rows = tuple({**row, "gradient_error_source": "predicted"} for row in rows)
    told = _terminal(replace(result, presets=rows), records, 200)
    assert "~ 0.270 %" in told
    assert "; ~ predicted" in told


def test_the_gain_over_the_16bit_run_has_its_column() -> None:
    assert "over 16-bit" in _terminal(*rehearsal(), 160)


def test_modelled_times_are_called_so(result: SearchResult, records: list[Run]) -> None:
    modelled = replace(result, best={**result.best, "sources": {"step_time_ms": "modelled"}})
    assert "modelled" in _terminal(modelled, records)


def test_a_verdict_of_stay_without_any_trial(stay: SearchResult) -> None:
    assert "reference" in _terminal(stay, [])


def test_non_finite_figures_are_missing_not_printed(broken: tuple[SearchResult, list[Run]]) -> None:
    assert "nan" not in _terminal(*broken).lower().replace("is nan", "")


def test_a_preset_that_failed_says_why(result: SearchResult, records: list[Run]) -> None:
    failed = {"name": "all fp8", "status": "crashed", "reason": "signal 11"}
    assert "all fp8: signal 11" in _terminal(replace(result, presets=(failed,)), records)
