"""What a person reads on a run's page."""

from __future__ import annotations

from dataclasses import replace

from autoprec.tracking.notes import parent_note, parent_params, trial_name
from autoprec.tuning.study.records import SearchResult, TrialRecord


def test_the_winner_table_comes_first(result: SearchResult) -> None:
    lines = parent_note(replace(result, script="/somewhere/train.py")).splitlines()
    assert lines[0].startswith("| what | speed |")
    assert lines[2].startswith("| **the policy** | 2.50x | 4.00 |")
    assert "/somewhere" not in "\n".join(lines)
    assert "autoprec run --policy policy.yaml train.py" in lines
    assert "| `h.*.mlp (2)` | fp8: saves 3 ms / adds little |" in lines
    assert "What mattered most: `layer:h.0.mlp` (50% of time, 25% of divergence)." in lines


def test_a_study_without_figures_still_has_a_note(result: SearchResult) -> None:
    stay = replace(result, verdict="stay", best={}, reference={}, presets=(), policy="", script="")
    assert "| reference (the script as written) | - | - | - | - | - |" in parent_note(stay)
    assert "best measured" not in parent_note(stay)
    assert "best measured" in parent_note(replace(stay, best={"name": "all bf16", "speedup": 0.9}))


def test_parameters_are_flat_text() -> None:
    found = parent_params({"a": {"b": 1, "c": None}, "argv": ["x", "--lr", 1], "t": ("y",)})
    assert found == {"a.b": "1", "argv": "x --lr 1", "t": "y"}


def test_names_of_trials(records: list[TrialRecord]) -> None:
    assert trial_name(records[2]) == "002 preset 2"
    assert trial_name(records[6]) == "006 finalist 6 (seed 1)"
    assert trial_name(replace(records[4], name="trial 4")) == "trial 4"
