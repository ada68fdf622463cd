"""The report says what the result says, in a table, in Markdown and on one self-contained page."""

from __future__ import annotations

import io
import json
import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from rich.console import Console

from autoprec import report
from autoprec.export import export
from autoprec.graph.report import GemmCall, GraphReport, Layer
from autoprec.policy import policy_from_dict
from autoprec.report.charts import gap_chart, pareto_chart
from autoprec.report.html import html_report
from autoprec.report.layers import layer_rows
from autoprec.report.markdown import markdown
from autoprec.report.summary import summarise
from autoprec.report.svg import Axis, Chart
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
    for heading in (
        "Compared with",
        "Every policy tried",
        "The loss curve",
        "Distance from",
        "Layer by layer",
        "sensitive",
    ):
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


def rehearsal() -> tuple[SearchResult, list[TrialRecord]]:
    """A search for a GPU as it really goes: a slow script in FP32, the 16-bit run ten times as fast, and finalists."""
    bf16 = {"recipes": {"bf16": {"format": "bf16"}}, "default": "bf16", "activations": "bf16"}
    fp8 = {"recipes": {"fp8": {"format": "fp8"}}, "default": "fp8", "activations": "bf16"}
    rows = [
        ("reference", "script as written", {}, 9544.0, 0.0, 0),
        ("preset", "all bf16", bf16, 874.0, 9e-5, 0),
        ("preset", "all fp8_rowwise", fp8, 668.0, 1.2e-3, 0),
        ("preset", "all fp8_delayed", fp8, 572.0, 7e-4, 0),
        ("finalist", "all fp8_rowwise", fp8, 668.0, 4e-4, 0),
        ("finalist", "all fp8_rowwise", fp8, 668.0, 6e-4, 1),
        ("finalist", "all bf16", bf16, 874.0, 1e-4, 1),
    ]
    records = []
    for number, (kind, name, policy, time, gap, seed) in enumerate(rows):
        metrics = {"step_time_ms": time, "divergence": gap, "speedup": 9544.0 / time, "gradient_error": 0.05}
        document = {"schema": "autoprec.policy/1", **policy} if policy else {}
        losses = tuple(4.0 - 0.1 * step + gap for step in range(10))
        record = TrialRecord(number, kind, name, {}, document, "ok", metrics=metrics, losses=losses, seed=seed)
        records.append(replace(record, sources=dict.fromkeys(metrics, "modelled")))

    def row(number: int) -> dict[str, Any]:
        return {**records[number].metrics, "name": records[number].name, "sources": dict(records[number].sources)}

    base = make_result(make_records())
    return replace(
        base,
        target="h100",
        best={**row(2), "divergence": 5e-4, "interval": 1e-4},
        reference=row(0),
        presets=(row(1), row(2), row(3)),
        front=(row(3), row(2)),
        trials={"complete": 3, "failed": 0},
        budget={"max_divergence": 0.0025, "max_gradient_error": 0.12, "gradient_noise": 0.5},
    ), records


def test_on_a_gpu_the_gain_over_the_16bit_run_comes_first() -> None:
    result, records = rehearsal()
    summary = summarise(result, records)
    assert summary.baseline is not None
    assert summary.baseline.name == "all bf16"
    assert summary.rows[0].speedup_over_16bit == pytest.approx(874 / 668)
    assert "over 16-bit" in _terminal(result, records, 160)
    page = html_report(result, records)
    assert re.search(r"<b>1.31x</b><span>over all bf16</span><small>668.0 ms per step; 14.29x over the script", page)
    assert "| the policy | 1.31x | 14.29x |" in markdown(result, records)
    assert summarise(replace(result, target="cpu"), records).baseline is None, "on a CPU people run what they wrote"


def test_a_figure_of_the_result_is_preferred_to_our_own() -> None:
    result, records = rehearsal()
    told = replace(result, best={**result.best, "speedup_over_16bit": 1.25})
    assert summarise(told, records).rows[0].speedup_over_16bit == 1.25


def test_a_policy_has_one_divergence_wherever_it_is_shown() -> None:
    result, records = rehearsal()
    summary = summarise(result, records)
    shown = {row.divergence for row in summary.rows if row.name in ("the policy", "all fp8_rowwise")}
    shown |= {point.divergence for point in summary.points if point.name == "all fp8_rowwise"}
    assert {round(value, 12) for value in shown if value is not None} == {5e-4}
    assert [point.name for point in summary.points].count("all fp8_rowwise") == 1


def test_the_front_is_that_of_the_points_shown() -> None:
    result, records = rehearsal()
    points = {point.name: point.front for point in summarise(result, records).points}
    assert points == {"all bf16": True, "all fp8_rowwise": True, "all fp8_delayed": True}
    worse = replace(records[3], metrics={**records[3].metrics, "step_time_ms": 700.0})
    points = {p.name: p.front for p in summarise(result, [*records[:3], worse, *records[4:]]).points}
    assert points["all fp8_delayed"] is False


def test_the_pareto_axis_is_that_of_the_policies_with_the_16bit_run_as_a_line() -> None:
    result, records = rehearsal()
    chart = pareto_chart(summarise(result, records))
    assert chart is not None
    assert chart.x.high < 1000, "the script's 9544 ms would press every dot into a corner"
    svg = chart.text()
    places = [float(x) for x in re.findall(r'<circle class="dot[^"]*" cx="([\d.]+)"', svg)]
    assert max(places) - min(places) > 0.6 * chart.width
    line = re.search(r'<line class="base" x1="([\d.]+)" y1="[\d.]+" x2="([\d.]+)"', svg)
    assert line is not None
    assert float(line[1]) == float(line[2]) == chart.at(874.0, 0)[0]
    assert "16-bit: all bf16" in svg
    assert "the script as written takes 9544.0 ms, beyond the axis" in svg


def test_labels_of_the_chart_do_not_cover_each_other() -> None:
    chart = Chart(Axis(0, 10, "x"), Axis(0, 10, "y"), "t")
    written = [chart.label(5 + 0.05 * n, 5 + 0.05 * n, f"a rather long name {n}") for n in range(20)]
    assert written[0]
    assert not all(written)
    boxes = chart._taken
    for index, (left, top, right, bottom) in enumerate(boxes):
        for a, b, c, d in boxes[:index]:
            assert not (a < right and left < c and b < bottom and top < d)


def test_presets_are_told_apart_by_colour_and_name() -> None:
    result, records = rehearsal()
    chart = gap_chart(summarise(result, records))
    assert chart is not None
    legend = chart.text().partition("<figcaption>")[2]
    names = re.findall(r'<i class="curve preset (p\d)"></i>([^<]+)<', legend)
    assert len({colour for colour, _ in names}) == len(names) >= 2
    assert {"all bf16", "all fp8_delayed"} <= {name for _, name in names}


def test_trials_and_runs_are_counted_apart() -> None:
    result, records = rehearsal()
    page = html_report(result, records)
    assert "for 3 trials, 7 runs in all" in page
    assert "<summary>7 runs: references, trials, and the finalists" in page


def test_gradient_error_is_defined_and_printed_one_way() -> None:
    result, records = rehearsal()
    page = html_report(result, records)
    assert "<td>5.00 %</td>" in page
    assert "the limit of this search is 6.00 %" in page, "0.12 of a gradient noise of 0.5"
    assert "<td>0.050</td>" not in page


def test_decisions_without_an_effect_are_not_called_important(result: SearchResult, records: list[TrialRecord]) -> None:
    noise = {"name": "fp8.amax_history_len", "time_share": 0.0, "error_share": 0.001}
    told = replace(result, explanation={"layers": (), "importance": [noise]})
    assert "amax_history_len</td>" not in html_report(told, records)
    assert "amax_history_len" not in markdown(told, records)


def test_the_export_that_is_recommended_works(tmp_path: Path) -> None:
    result, records = rehearsal()
    for format_, scaling, target in (
        ("fp8", {"granularity": "tensor", "scale": "current"}, "torchao"),
        ("fp8", {"granularity": "tensor", "scale": "delayed"}, "transformer-engine"),
        ("int8", None, "python"),
    ):
        recipe = {"format": format_} | ({"scaling": scaling} if scaling else {})
        document = {
            "schema": "autoprec.policy/1",
            "recipes": {"r": recipe},
            "default": "r",
            "activations": "bf16",
            "operators": dict.fromkeys(("softmax", "norm", "embedding", "loss", "output"), "keep"),
        }
        page = html_report(result, [replace(r, policy=document) if "rowwise" in r.name else r for r in records])
        found = re.search(r"autoprec export policy.yaml --to (\S+?)<", page)
        assert found is not None
        assert found[1] == target
        if target != "python":
            assert export(policy_from_dict(document), found[1]).losses == ()


def test_a_stay_plots_no_script_against_itself_and_says_why_each_layer_stays() -> None:
    result, records = rehearsal()
    why = [{"layers": "blocks.*.fc (3)", "choice": "keep", "text": "K 384 is too small to pay for casts"}]
    stay = replace(
        result, verdict="stay", best=dict(result.reference), presets=(), front=(), explanation={"layers": why}
    )
    page = html_report(stay, records[:1])
    assert "<svg" not in page
    assert "K 384 is too small to pay for casts" in page
    assert "What keeps each kind of layer as it is" in page


def test_the_best_of_a_search_that_was_resumed_is_not_the_layers_of_the_best_before(graph: GraphReport) -> None:
    result, records = rehearsal()
    earlier = replace(records[1], tags=("best",))
    rows = layer_rows(result, [records[0], earlier, *records[2:]], graph)
    assert {label for row in rows for label, _ in row.gemms.values()} == {"fp8"}


@pytest.mark.parametrize("width", [390, 1280])
def test_nothing_overflows_its_card_in_a_browser(tmp_path: Path, graph: GraphReport, width: int) -> None:
    """On a phone wide tables scroll inside their card; the page itself never scrolls sideways."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("needs Chromium")
    result, records = rehearsal()
    choices = [f"fp8_{name}" for name in ("rowwise", "tensorwise", "delayed", "block", "rowwise/wgrad=bf16")]
    rows = tuple(
        {"group": f"blocks.{n}.attn.qkv", "choice": c, "gradient_error": 0.02} for n in range(3) for c in choices
    )
    page = html_report(replace(result, sensitivity=rows), records, graph)
    measure = (
        "<script>onload=()=>{const wide=[...document.querySelectorAll('section,header')].filter(card=>"
        "[...card.querySelectorAll('*')].some(e=>!e.closest('.wide,figure,pre')&&"
        "e.getBoundingClientRect().right>card.getBoundingClientRect().right+1));"
        "parent.document.title=JSON.stringify([wide.map(c=>c.innerText.slice(0,30)),"
        "document.documentElement.scrollWidth])}</script>"
    )
    page = re.sub(r"<meta http-equiv[^>]*>", "", page).replace("</body>", f"{measure}</body>")
    (tmp_path / "page.html").write_text(page, encoding="utf-8")
    frame = f'<body style="margin:0"><iframe src="page.html" style="width:{width}px;height:900px;border:0"></iframe>'
    (tmp_path / "frame.html").write_text(frame, encoding="utf-8")
    command = [chromium, "--headless", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files"]
    command += [f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=3000", "--dump-dom"]
    out = subprocess.run(
        [*command, (tmp_path / "frame.html").as_uri()], capture_output=True, text=True, timeout=120, check=False
    ).stdout
    found = re.search(r"<title>(.*?)</title>", out)
    assert found is not None, out
    overflowing, scroll_width = json.loads(found[1])
    assert overflowing == []
    assert scroll_width <= width
