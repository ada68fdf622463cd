"""The page says what the result says, fetches nothing, and stays inside its cards."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from autoprec.export import export
from autoprec.graph.report import GraphReport
from autoprec.policy import policy_from_dict
from autoprec.reports.html import _cell, html_report, write_html
from autoprec.tuning.study.records import SearchResult
from autoprec.tuning.study.run import Run
from tests.reports.conftest import rehearsal
from tests.reports.test_shares import ROWS

VOID = {"meta", "br", "circle", "polygon", "line", "polyline"}


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


def test_the_page_is_well_formed_small_and_fetches_nothing(
    tmp_path: Path, result: SearchResult, records: list[Run], graph: GraphReport
) -> None:
    path = write_html(tmp_path / "report.html", result, records, graph)
    text = path.read_text(encoding="utf-8")
    checker = _Checker()
    checker.feed(text)
    assert checker.open == []
    assert checker.addresses == []
    assert "http://" not in text
    assert "https://" not in text
    assert "<script" not in text
    assert "default-src 'none'" in text


def test_a_large_study_stays_under_three_megabytes(result: SearchResult, records: list[Run]) -> None:
    many = [replace(records[4], number=n, name=f"trial {n}", losses=tuple(range(200))) for n in range(2000)]
    assert len(html_report(result, [*records, *many])) < 3_000_000


def test_the_page_shows_every_section(result: SearchResult, records: list[Run], graph: GraphReport) -> None:
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


def test_the_variant_that_was_searched_is_in_the_facts_the_chart_and_the_commands(
    result: SearchResult, records: list[Run]
) -> None:
    """The commands to run the policy left out the arguments that it was found with."""
    row = {"name": "whole", "arguments": "--micro 1", "status": "accepted", "reason": "faster"}
    for chosen in (False, True):
        page = html_report(replace(result, script="train.py", variants=({**row, "chosen": chosen},)), records)
        assert ("under whole: --micro 1, where no other variant is named" in page) is chosen
        assert ("Each dot is one policy (under whole, where no other variant is named), " in page) is chosen
        assert ("train.py --micro 1\n" in page) is chosen
    given = {**row, "chosen": True, "adopted": False}  # the answer is for the script as given
    page = html_report(replace(result, script="train.py", variants=(given,)), records)
    assert "train.py --micro 1\n" not in page


def test_hostile_names_are_escaped(result: SearchResult, records: list[Run]) -> None:
    evil = "<script>alert(1)</script>"
    records = [replace(r, name=evil, reason=evil) if r.number == 4 else r for r in records]
    assert evil not in html_report(replace(result, reason=evil, script=evil, study_name=evil), records)


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


def test_an_interval_may_go_below_its_figure() -> None:
    """The comparison's last column was cut off on a page of 960 px."""
    assert _cell("1.98x (1.94x to 2.05x)") == '<td class="range">1.98x <span>(1.94x to 2.05x)</span></td>'
    assert _cell("<b>") == "<td>&lt;b&gt;</td>"


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
    page = html_report(replace(result, sensitivity=rows, explanation={"decisions": ROWS}), records, graph)
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


def test_on_a_gpu_the_first_figure_is_the_gain_over_the_16bit_run() -> None:
    page = html_report(*rehearsal())
    assert re.search(r"<b>1.31x</b><span>over all bf16</span><small>668.0 ms per step; 14.29x over the script", page)


def test_modelled_times_give_no_payback(result: SearchResult, records: list[Run]) -> None:
    modelled = replace(result, best={**result.best, "sources": {"step_time_ms": "modelled"}})
    assert "modelled for another machine" in html_report(modelled, records)


def test_a_verdict_of_stay_without_any_trial(stay: SearchResult) -> None:
    text = html_report(stay, [])
    assert "Stay as you are" in text
    assert "<svg" not in text


def test_a_verdict_from_the_cost_model_alone_shows_no_candidate(modelled_stay: SearchResult) -> None:
    text = html_report(modelled_stay, [])
    assert "candidate" not in text
    assert ".apply(model)" not in text  # there is nothing to load


def test_non_finite_figures_are_missing_not_printed(broken: tuple[SearchResult, list[Run]]) -> None:
    assert "nan" not in html_report(*broken).lower().replace("is nan", "")
