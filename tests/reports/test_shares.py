"""The chart of what each decision did: figures and intervals, drawn within their cells, and said to be fitted."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from autoprec.reports.html import html_report
from autoprec.reports.shares import share_chart, share_words
from autoprec.tuning.study.records import SearchResult
from autoprec.tuning.study.run import Run


def amount(value: float, low: float, high: float) -> dict[str, float]:
    return {"value": value, "low": low, "high": high}


def row(name: str, choice: str, over: str = "bf16", layers: int = 4, **changes: Any) -> dict[str, Any]:
    told = {"saved_ms": amount(1.2, 0.9, 1.5), "time_share": amount(0.6, 0.45, 0.75)}
    told |= {"divergence_share": amount(0.3, 0.1, 0.55), "source": "fitted"}
    return {"decision": name, "choice": choice, "over": over, "layers": layers} | told | changes


ROWS = (
    row("h.*.mlp.c_fc (4)", "fp8_rowwise"),
    row("optimizer.exp_avg", "bf16", "fp32", 0, saved_ms=amount(0.0, 0.0, 0.0), time_share=amount(0.0, 0.0, 0.0)),
    row("lm_head", "bf16", saved_ms=amount(0.0, 0.0, 0.0), divergence_share=amount(-0.1, -2.0, 0.1)),
    row("together", "", "", 9, saved_ms=amount(2.0, 1.7, 2.3), time_share=None, divergence_share=None),
)


def test_every_decision_has_its_figures_and_their_intervals() -> None:
    text = share_chart(ROWS)
    assert text.count("<tr") == 1 + len(ROWS)
    assert text.count("<svg") == 2 * (len(ROWS) - 1)
    assert '<small>fp8_rowwise over bf16</small></td><td class="range">1.2 ms <span>[0.9, 1.5]</span></td>' in text
    assert "60 % [45, 75]" in text
    assert "30 % [10, 55]" in text
    assert '<small>bf16 over fp32</small></td><td class="range">0 ms</td>' in text
    assert "<small>bf16</small>" in text  # of what is as in the baseline
    assert '<td>together</td><td class="range">2 ms <span>[1.7, 2.3]</span></td>' in text


def test_what_is_drawn_stays_within_its_cell() -> None:
    text = share_chart(ROWS)
    places = [float(x) for x in re.findall(r' (?:x1|x2|cx)="([\d.-]+)"', text)]
    assert places
    assert all(5 <= x <= 115 for x in places)
    # an interval is drawn from its low end to its high end, with its figure between them
    low, high, middle = re.findall(r'class="reach" x1="([\d.]+)".*?x2="([\d.]+)".*?cx="([\d.]+)"', text)[0]
    assert float(low) < float(middle) < float(high)


def test_where_the_gain_may_be_none_there_are_no_shares_of_it_and_that_is_said() -> None:
    rows = [one | {"time_share": None} for one in ROWS]
    assert "–" in share_chart(rows)
    assert "cannot be told from none" in share_words(rows)
    assert "cannot be told from none" not in share_words(ROWS)


@pytest.mark.parametrize(("whole", "doubted"), [(None, False), (2.2, False), (1.65, False), (1.2, True), (4.0, True)])
def test_a_fit_that_does_not_explain_what_was_measured_is_doubted(whole: float | None, doubted: bool) -> None:
    *rows, together = ROWS
    said = share_words([*rows, together | {"whole_ms": whole}])
    assert ("which the fit does not explain" in said) is doubted


@pytest.mark.parametrize(
    ("source", "said"), [("fitted", "not measured one by one"), ("modelled", "Times are the cost model's")]
)
def test_what_was_not_measured_is_not_called_measured(source: str, said: str) -> None:
    assert said in share_words([one | {"source": source} for one in ROWS])


def test_a_study_without_decisions_has_no_such_section(result: SearchResult, records: list[Run]) -> None:
    assert share_chart(()) == ""
    assert "What each decision did" not in html_report(result, records)


def test_the_page_has_it_and_names_of_layers_are_text(result: SearchResult, records: list[Run]) -> None:
    told = replace(result, explanation={"decisions": [row("<b>x</b>", "fp8_rowwise"), *ROWS]})
    page = html_report(SearchResult.from_json(told.to_json()), records)
    assert "What each decision did" in page
    assert "&lt;b&gt;x&lt;/b&gt;" in page
    assert "fitted to the runs of this search" in page
