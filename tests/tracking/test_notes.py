"""What a person reads on a run's page."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from markdown_it import MarkdownIt

from autoprec.tracking.notes import limits_of, parent_note, parent_params
from autoprec.tuning.study.records import SearchResult
from tests.reports.conftest import rehearsal


def test_the_winner_table_comes_first(result: SearchResult) -> None:
    lines = parent_note(replace(result, script="/somewhere/train.py")).splitlines()
    assert lines[0].startswith("| what | speed |")
    assert lines[2].startswith("| the policy | 2.50x | 4 ms |")
    assert "/somewhere" not in "\n".join(lines)
    assert "autoprec run --policy policy.yaml train.py" in lines
    assert "| `h.*.mlp (2)` | fp8: saves 3 ms \\| adds little |" in lines


@pytest.mark.parametrize(
    "bad", ["<img src=x onerror=PWNED()>", "![x](http://evil/PWNED.png)", "a`|[PWNED](x)|`\x1b[2J"]
)
def test_a_hostile_name_makes_no_markup(result: SearchResult, bad: str) -> None:
    rows = [{"layers": bad, "text": bad}]
    hostile = replace(
        result, reason=bad, target=bad, script=bad, policy=bad, presets=({**result.presets[0], "name": bad},),
        explanation={**result.explanation, "layers": rows},
    )  # fmt: skip
    note = parent_note(hostile)
    page = MarkdownIt("commonmark").enable("table").render(note)
    assert "PWNED" in page
    assert not [tag for tag in ("<img", "<a ", "<script") if tag in page]
    assert note.isprintable() or set(filter(lambda c: not c.isprintable(), note)) == {"\n"}


def test_a_study_without_figures_still_has_a_note(result: SearchResult) -> None:
    stay = replace(result, verdict="stay", best={}, reference={}, presets=(), policy="", script="")
    assert "| reference: the script as written | – | – | – | – | – |" in parent_note(stay)
    assert "fastest candidate" not in parent_note(stay)
    assert "Nothing is registered" in parent_note(stay)
    assert "Nothing is registered" not in parent_note(result)
    assert "fastest candidate" in parent_note(replace(stay, best={"name": "all bf16", "step_time_ms": 9.0}))


def test_every_row_of_a_table_has_as_many_cells(result: SearchResult) -> None:
    rows = [line for line in parent_note(result).splitlines() if line.startswith("|")]
    assert {len(re.findall(r"(?<!\\)\|", row)) for row in rows} == {3, 7}


def test_on_a_gpu_the_gain_over_the_16bit_run_is_the_first_column() -> None:
    lines = parent_note(rehearsal()[0]).splitlines()
    assert lines[0].startswith("| what | over 16-bit | over the script")
    assert lines[2].startswith("| the policy | 1.31x | 14.29x |")


def test_a_figure_that_is_not_finite_is_missing_not_printed(result: SearchResult) -> None:
    note = parent_note(replace(result, best={**result.best, "divergence": float("nan"), "memory_bytes": None}))
    assert " nan" not in note.lower()


def test_limits_that_are_not_known_are_left_out(result: SearchResult) -> None:
    own = replace(result, budget={"max_divergence": 0.0025, "gradient_limit": 0.0611831925})
    assert limits_of(own, {"max_memory": 2**30}) == {
        "limit.divergence": "0.0025",
        "limit.gradient_error": "0.0611832",
        "limit.memory": "1.07374e+09",
    }
    assert limits_of(replace(result, budget={}), {}) == {}


def test_memory_in_the_note_is_in_the_unit_of_the_report(result: SearchResult) -> None:
    best = {**result.best, "memory_bytes": 38_370_000_000.0}
    assert "| 35.7 GiB |" in parent_note(replace(result, best=best))


def test_a_search_that_was_cut_short_is_not_told_as_a_stay(result: SearchResult) -> None:
    cut = replace(result, verdict="undecided", reason="cut short: no trial ended", best={}, policy="")
    assert "**Undecided.** cut short: no trial ended" in parent_note(cut).splitlines()


def test_parameters_are_flat_text() -> None:
    found = parent_params({"a": {"b": 1, "c": None}, "argv": ["x", "--lr", 1], "t": ("y",)})
    assert found == {"a.b": "1", "argv": "x --lr 1", "t": "y"}
