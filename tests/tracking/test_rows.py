"""What each trial's run shows, from the study's records and its answer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from autoprec.tracking.rows import TrialRun, shown_metrics, trial_runs
from autoprec.tuning.study.records import SearchResult
from autoprec.tuning.study.run import Run, metrics_of


def test_the_table_of_trials_has_rounded_figures_in_the_units_people_read() -> None:
    metrics = {
        "speedup": 9.35892271,
        "step_time_ms": 588.5064,
        "divergence": 0.000248278,
        "memory_bytes": 130748741061.0,
    }
    shown = {"gain": 9.36, "step_ms": 588.5, "divergence_pct": 0.025, "memory_gib": 121.77}
    assert shown_metrics(metrics) == shown
    assert shown_metrics({**metrics, "speedup_over_16bit": 1.4857})["gain"] == 1.49
    assert shown_metrics({"speedup": float("nan"), "divergence": None}) == {}


def _runs(records: list[Run], result: SearchResult | None, **info: Any) -> dict[str, TrialRun]:
    return {run.name: run for run in trial_runs(records, result, info, "demo")}


def test_names_of_trials(records: list[Run], result: SearchResult) -> None:
    names = [run.name for run in trial_runs(records, None, {}, "demo")]
    assert (names[2], names[6]) == ("preset 2", "finalist 6 (seed 1)")
    assert trial_runs([replace(records[6], seed=0)], None, {}, "demo")[0].name == "finalist 6 (whole model)"
    assert "\u2605 search 5" in _runs(records, replace(result, best={**result.best, "name": "search 5"}))
    assert "the script's own autocast" in _runs(records, replace(result, budget={"written": "bf16 autocast"}))


def test_a_script_much_slower_than_bf16_is_not_drawn_beside_the_policies(result: SearchResult) -> None:
    record = replace(_record("reference", "reference", 0, 1.0), seconds=2.0)
    row = {"name": "reference", "speedup": 1.0, "step_time_ms": 10.0, "divergence": 0.0}
    drawn = {}
    for share in (0.0975, 0.9, None):
        known = row if share is None else {**row, "speedup_over_16bit": share}
        (run,) = trial_runs([record], replace(result, best=row, reference=known, presets=()), {}, "demo")
        drawn[share] = run.figures.get("divergence_pct")
    assert drawn == {0.0975: None, 0.9: 0.0, None: 0.0}
    (before,) = trial_runs([record], None, {}, "demo")
    assert "divergence_pct" not in before.figures, "how it compares is known at the end"


def _record(name: str, kind: str, seed: int, speedup: float, **known: float) -> Run:
    metrics = {"speedup": speedup, "divergence": 1e-4, "step_time_ms": 10 / speedup, **known}
    return Run(0, kind, name, {}, {}, "ok", metrics=metrics_of(metrics), seed=seed)


def test_the_gain_of_every_row_is_over_one_16_bit_run(result: SearchResult) -> None:
    """Each trial was reported over the 16-bit run as it was known then: 2.0 at first, 1.6 over all its runs."""
    records = [
        _record("all bf16", "preset", 0, 2.0, speedup_over_16bit=1.0),
        _record("all bf16", "finalist", 0, 1.2, speedup_over_16bit=1.0),
        _record("search 4", "search", 0, 2.4, speedup_over_16bit=1.2),
        _record("search 5", "search", 0, 3.2, speedup_over_16bit=1.6),
        _record("search 5", "finalist", 1, 3.2, speedup_over_16bit=1.6),
        _record("search 6", "search", 0, 1.6, speedup_over_16bit=1.0),
    ]
    reference = {"name": "script as written", "speedup": 1.0, "speedup_over_16bit": 1 / 1.6}
    presets = ({"name": "all bf16", "speedup": 1.6, "speedup_over_16bit": 1.0},)
    runs = _runs(records, replace(result, best=reference, reference=reference, presets=presets))
    assert runs["search 5"].figures["speedup_over_16bit"] == 2.0
    gains = {name: run.figures["gain"] for name, run in runs.items() if "seeds" in run.figures}
    assert gains == {"all bf16": 1.0, "search 4": 1.5, "search 5": 2.0, "search 6": 1.0}


def test_what_was_rejected_is_not_on_the_front(records: list[Run], result: SearchResult) -> None:
    """A row that says `infeasible` and `pareto` at once offers what must not be taken."""
    own = replace(result, front=({"name": "search 4"}, {"name": "search 5"}), rejected={"search 4": "beyond 0.250%"})
    runs = _runs(records, own)
    assert [runs["search 5"].tags[name] for name in ("pareto", "infeasible")] == ["true", "false"]
    assert [runs["search 4"].tags[name] for name in ("pareto", "infeasible")] == ["false", "true"]
    assert runs["search 4"].tags["not_taken"] == "beyond 0.250%"


@pytest.mark.parametrize(
    ("metric", "value", "says"),
    [
        ("gradient_error", 0.08, "gradient error 8.00 %, limit 6.12 %"),
        ("divergence", 0.01, "divergence 1.00 %, limit 0.250 %"),
        ("memory_bytes", 3 * 2.0**30, "memory 3.00 GiB, limit 2.00 GiB"),
    ],
)
def test_a_row_that_breaks_a_limit_says_so_though_it_was_never_a_finalist(
    result: SearchResult, metric: str, value: float, says: str
) -> None:
    fine = {"gradient_error": 0.01, "noise_floor": 1e-4, "memory_bytes": 2.0**30}
    fast = _record("fast", "search", 0, 3.0, **fine | {metric: value} if metric != "divergence" else fine)
    fast = replace(fast, metrics=fast.metrics | metrics_of({metric: value}))
    best = _record("best", "search", 0, 2.0, **fine)
    own = replace(
        result, best={"name": "best", "speedup": 2.0}, budget={"max_divergence": 0.0025, "gradient_limit": 0.0612}
    )
    runs = _runs([fast, best], own, max_memory=2 * 2**30)
    assert runs["fast"].tags["infeasible"] == "true"
    assert runs["fast"].tags["not_taken"] == says
    assert runs["\u2605 best"].tags["not_taken"] == ""


def test_what_was_faster_and_not_taken_says_why(records: list[Run], result: SearchResult) -> None:
    runs = _runs(records, replace(result, not_taken={"search 5": "faster by no more than the timing noise"}))
    assert runs["search 5"].tags["not_taken"] == "faster by no more than the timing noise"
    assert runs["preset 2"].tags["not_taken"] == "not faster than the answer"


def test_before_there_is_an_answer_nothing_is_marked(records: list[Run]) -> None:
    for run in trial_runs(records, None, {}, "demo"):
        assert (run.figures.get("seeds"), run.tags.get("not_taken"), run.tags["best"]) == (None, None, "false")
