"""Lines of Markdown, of which a run's description is made."""

from __future__ import annotations

import re

from autoprec.report.markdown import comparison, verdict, why
from autoprec.tuning.study.records import SearchResult
from autoprec.tuning.study.run import Run
from tests.report.conftest import rehearsal


def test_every_row_of_a_table_has_as_many_cells(result: SearchResult) -> None:
    lines = [*comparison(result), *why(result)]
    assert "| the policy | 2.50x |" in lines[2]
    assert "| `h.*.mlp (2)` | fp8: saves 3 ms \\| adds little |" in lines
    for line in lines:
        if line.startswith("|"):
            assert len(re.findall(r"(?<!\\)\|", line)) in (3, 7)


def test_on_a_gpu_the_gain_over_the_16bit_run_is_the_first_column() -> None:
    lines = comparison(rehearsal()[0])
    assert lines[0].startswith("| what | over 16-bit | over the script")
    assert lines[2].startswith("| the policy | 1.31x | 14.29x |")


def test_a_verdict_of_stay_without_any_trial(stay: SearchResult) -> None:
    assert verdict(stay)[0].startswith("**Stay.** too small")


def test_a_verdict_from_the_cost_model_alone_shows_no_candidate(modelled_stay: SearchResult) -> None:
    assert not [line for line in comparison(modelled_stay) if "candidate" in line]


def test_non_finite_figures_are_missing_not_printed(broken: tuple[SearchResult, list[Run]]) -> None:
    assert not [line for line in comparison(broken[0]) if "nan" in line.lower()]
