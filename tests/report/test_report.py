"""The report says what the result says, in a table, in Markdown and on one self-contained page."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
from rich.console import Console

from autoprec import report
from autoprec.graph.report import GemmCall, GraphReport, Layer
from autoprec.report.html import html_report
from autoprec.report.markdown import markdown
from autoprec.report.summary import summarise
from autoprec.tuning.study.records import SearchResult, TrialRecord
from tests.tracking.conftest import make_records, make_result

VOID = {"meta", "circle", "polygon", "line", "polyline"}


class _Checker(HTMLParser):
    """Every tag is closed, and nothing is fetched."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.addresses += [str(v) for k, v in attrs if k in ("src", "href", "action", "data")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag


@pytest.fixture
def records() -> list[TrialRecord]:
    return make_records()


@pytest.fixture
def result(records: list[TrialRecord]) -> SearchResult:
    rows = ({"group": "h.*.attn", "choice": "bf16", "gradient_error": 0.01, "measured": True},)
    rows += ({"group": "h.*.mlp", "choice": "bf16", "gradient_error": 0.2, "measured": False},)
    return replace(make_result(records), sensitivity=rows, notes=("a <b>note</b>",))


@pytest.fixture
def graph() -> GraphReport:
    gemms = tuple(GemmCall(role, 8, 16, 32) for role in ("fprop", "dgrad", "wgrad"))
    flops = {gemm.role: gemm.flops for gemm in gemms}
    layers = tuple(
        Layer(name, "Linear", "linear", f"{name}.weight", "g", gemms, 512, True, "", (), flops)
        for name in ("h.0.attn", "h.0.mlp")
    )
    return GraphReport({"class": "GPT"}, layers, (), {}, 1, 1.0)


def _terminal(result: SearchResult, records: list[TrialRecord], width: int = 120) -> str:
    out = io.StringIO()
    Console(file=out, width=width, no_color=True).print(report.terminal_table(result, records))
    return out.getvalue()


def test_the_terminal_table_has_policy_reference_presets_and_confidence(
    result: SearchResult, records: list[TrialRecord]
) -> None:
    text = _terminal(result, records)
    for part in ("the policy", "2.50x", "0.060 ± 0.020 %", "preset 2", "noise floor 0.040 %", "measured"):
        assert part in text


def test_the_page_is_well_formed_small_and_fetches_nothing(
    tmp_path: Path, result: SearchResult, records: list[TrialRecord], graph: GraphReport
) -> None:
    path = report.write_html(tmp_path / "report.html", result, records, graph)
    text = path.read_text(encoding="utf-8")
    checker = _Checker()
    checker.feed(text)
    assert checker.open == []
    assert checker.addresses == []
    assert "http://" not in text
    assert "https://" not in text
    assert "<script" not in text
    assert "default-src 'none'" in text


def test_a_large_study_stays_under_three_megabytes(result: SearchResult, records: list[TrialRecord]) -> None:
    many = [replace(records[4], number=n, name=f"trial {n}", losses=tuple(range(200))) for n in range(2000)]
    assert len(html_report(result, [*records, *many])) < 3_000_000


def test_the_page_shows_every_section(result: SearchResult, records: list[TrialRecord], graph: GraphReport) -> None:
    text = html_report(result, records, graph)
    for heading in ("Compared with", "Every trial", "The loss curve", "Distance from", "Layer by layer", "sensitive"):
        assert heading in text
    assert text.count("<svg") == 3
    assert "<code>h.0.mlp</code>" in text
    assert "as written" in text  # h.0.mlp is kept by the policy of the best trial
    assert "diverged: loss is NaN" in text
    assert "a &lt;b&gt;note" in text
    assert "fp8: saves 3 ms | adds little" in text
    assert "<td>layer:h.0.mlp</td><td>50%</td><td>25%</td>" in text


def test_charts_are_files_of_their_own(tmp_path: Path, result: SearchResult, records: list[TrialRecord]) -> None:
    paths = report.write_charts(tmp_path, result, records)
    assert [path.name for path in paths] == ["pareto.svg", "loss_gap.svg", "sensitivity.html"]
    for path in paths[:2]:
        root = ElementTree.fromstring(path.read_text(encoding="utf-8"))
        assert root.tag == "{http://www.w3.org/2000/svg}svg"


def test_hostile_names_are_escaped(result: SearchResult, records: list[TrialRecord]) -> None:
    evil = "<script>alert(1)</script>"
    records = [replace(r, name=evil, reason=evil) if r.number == 4 else r for r in records]
    assert evil not in html_report(replace(result, reason=evil, script=evil, study=evil), records)


def test_markdown_is_a_table_per_section(result: SearchResult, records: list[TrialRecord]) -> None:
    text = markdown(result, records)
    assert "| the policy | 2.50x |" in text
    assert "## The front" in text
    assert "has paid for itself after 2 min 30 s" in text
    assert "| `h.*.mlp (2)` | fp8: saves 3 ms \\| adds little |" in text
    assert "| `layer:h.0.mlp` | 50% | 25% |" in text
    assert "## Why" not in markdown(replace(result, explanation={}), records)
    for line in text.splitlines():
        if line.startswith("|"):
            assert len(re.findall(r"(?<!\\)\|", line)) in (3, 4, 7)


def test_payback_is_seconds_over_saved_share(result: SearchResult, records: list[TrialRecord]) -> None:
    payback = summarise(result, records).payback
    assert payback.saved_share == pytest.approx(0.6)
    assert payback.break_even_s == pytest.approx(150.0)


def test_modelled_times_give_no_payback(result: SearchResult, records: list[TrialRecord]) -> None:
    best = {**result.best, "sources": {"step_time_ms": "modelled"}}
    modelled = replace(result, best=best)
    assert summarise(modelled, records).payback.break_even_s is None
    assert "modelled" in _terminal(modelled, records)
    assert "modelled for another machine" in html_report(modelled, records)


def test_a_verdict_of_stay_without_any_trial(tmp_path: Path, result: SearchResult) -> None:
    stay = replace(result, verdict="stay", best={}, presets=(), front=(), reason="too small", policy="", sensitivity=())
    text = html_report(stay, [])
    assert "Stay as you are" in text
    assert "<svg" not in text
    assert "**Stay.** too small" in markdown(stay, [])
    assert "reference" in _terminal(stay, [])
    assert report.write_markdown(tmp_path / "r.md", stay, []).exists()


def test_a_verdict_from_the_cost_model_alone_shows_no_candidate(result: SearchResult) -> None:
    stay = replace(result, verdict="stay", best=dict(result.reference), presets=(), front=(), trials={"complete": 0})
    assert [row.role for row in summarise(stay, []).rows] == ["reference"]
    for text in (html_report(stay, []), markdown(stay, [])):
        assert "candidate" not in text
        assert ".apply(model)" not in text  # there is nothing to load


def test_non_finite_figures_are_missing_not_printed(result: SearchResult, records: list[TrialRecord]) -> None:
    nan = float("nan")
    broken = replace(result, best={**result.best, "divergence": nan, "memory_bytes": None})
    records = [replace(r, losses=(nan, *r.losses[1:])) for r in records]
    for text in (html_report(broken, records), markdown(broken, records), _terminal(broken, records)):
        assert "nan" not in text.lower().replace("is nan", "")
