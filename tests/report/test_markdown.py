"""The report as Markdown."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from autoprec.report.markdown import markdown, write_markdown
from autoprec.tuning.study.records import SearchResult
from autoprec.tuning.study.run import Run
from tests.report.conftest import rehearsal


def test_markdown_is_a_table_per_section(result: SearchResult, records: list[Run]) -> None:
    text = markdown(result, records)
    assert "| the policy | 2.50x |" in text
    assert "## The front" in text
    assert "has paid for itself in a run that would have taken 2.5 min" in text
    assert "| `h.*.mlp (2)` | fp8: saves 3 ms \\| adds little |" in text
    assert "## Why" not in markdown(replace(result, explanation={}), records)
    for line in text.splitlines():
        if line.startswith("|"):
            assert len(re.findall(r"(?<!\\)\|", line)) in (3, 4, 7)


def test_on_a_gpu_the_gain_over_the_16bit_run_is_the_first_column() -> None:
    text = markdown(*rehearsal())
    assert "| the policy | 1.31x | 14.29x |" in text
    before, front = text.split("## The front")
    assert "| what | over 16-bit | over the script" in before
    assert "| what | over 16-bit | over the script" in front.split("## Cost")[0]
    assert re.search(r"The policy saves .* \(modelled for another machine", text)


def test_a_verdict_of_stay_without_any_trial(tmp_path: Path, stay: SearchResult) -> None:
    text = markdown(stay, [])
    assert "**Stay.** too small" in text
    assert write_markdown(tmp_path / "r.md", stay, []).read_text(encoding="utf-8") == text


def test_a_verdict_from_the_cost_model_alone_shows_no_candidate(modelled_stay: SearchResult) -> None:
    text = markdown(modelled_stay, [])
    assert "candidate" not in text
    assert ".apply(model)" not in text  # there is nothing to load


def test_non_finite_figures_are_missing_not_printed(broken: tuple[SearchResult, list[Run]]) -> None:
    assert "nan" not in markdown(*broken).lower().replace("is nan", "")
