"""What is in MLflow afterwards: names it accepts, a run per trial, one answer per study; and nothing twice."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoprec.tracking.log import log_study
from autoprec.tracking.store import safe_key
from autoprec.tracking.study import About
from tests.tracking.conftest import make_records, make_result, make_study, tracked_runs

pytestmark = pytest.mark.filterwarnings("ignore")


@settings(max_examples=30)
@given(st.text(max_size=400))
def test_every_name_becomes_one_that_mlflow_accepts(name: str) -> None:
    key = safe_key(name)
    assert 0 < len(key) <= 250
    assert re.fullmatch(r"[/\w.\- :]+", key)
    assert ".." not in key
    assert not key.startswith("/")


def test_readable_names_stay() -> None:
    assert safe_key("layer/transformer.h.0.attn") == "layer/transformer.h.0.attn"
    assert safe_key("h.*.attn{q,k}") == "h._.attn_q_k_"


def test_a_trial_has_its_policy_metrics_curves_and_tags(tracked: dict[str, Any]) -> None:
    (run,) = tracked_runs(tracked, "tags.`autoprec.number` = '4'")
    assert run.data.params["layer/h._.attn"] == "bf16"
    assert run.data.params["fp8.amax_history_len"] == "16"
    assert run.data.tags["pareto"] == "true"
    assert run.data.tags["preset"] == "false"
    for name in ("loss", "reference_loss", "loss_gap_pct"):
        history = tracked["client"].get_metric_history(run.info.run_id, name)
        assert [point.step for point in history] == list(range(10))
    files = [artifact.path for artifact in tracked["client"].list_artifacts(run.info.run_id)]
    assert files == ["policy.yaml"]
    assert run.info.status == "FINISHED"


def test_a_trial_has_a_row_of_its_own_and_its_paired_seeds_do_not(tracked: dict[str, Any]) -> None:
    rows = tracked_runs(tracked, "tags.`autoprec.row` = 'policy'")
    assert sorted(run.data.tags["autoprec.kind"] for run in rows) == ["preset"] * 2 + ["reference"] + ["search"] * 3
    (run,) = tracked_runs(tracked, "tags.`autoprec.number` = '3'")
    assert run.data.metrics["step_ms"] == 7.0
    assert run.data.metrics["divergence_pct"] == 0.03


def test_a_policy_that_was_measured_again_has_the_figures_of_all_its_runs_and_the_answer_is_marked(
    tracked: dict[str, Any],
) -> None:
    (row,) = tracked_runs(tracked, "tags.`autoprec.row` = 'policy' and tags.`autoprec.name` = 'search 5'")
    assert row.info.run_name == "★ search 5"
    assert row.data.metrics["divergence_pct"] == 0.07, "the mean of its own 0.05 %, 0.06 % and 0.10 %"
    assert row.data.metrics["seeds"] == 3
    assert row.data.metrics["divergence"] == 7e-4, "one figure under both of its names"
    (other,) = tracked_runs(tracked, "tags.`autoprec.row` = 'policy' and tags.`autoprec.name` = 'search 4'")
    shown = {name: other.data.metrics[name] for name in ("divergence_pct", "seeds", "gain", "step_ms")}
    assert shown == {"divergence_pct": 0.07, "seeds": 2, "gain": 2.08, "step_ms": 4.8}, "its speed is not one run's"


def test_a_resumed_study_shows_one_answer_and_the_trials_it_was_given(tmp_path: Path, tracked: dict[str, Any]) -> None:
    uri = tracked["logged"].tracking_uri
    records = make_records()
    first = make_result(records)
    second = replace(first, best={**first.best, "step_time_ms": 2.0, "speedup": 1.1, "name": "search 5"})
    folder = make_study(tmp_path / "again", records)
    for trials, result in ((10, first), (20, second)):
        folder.save_about(About("again", info={"trials": trials}))
        folder.save_outcome(result)
        sent = log_study(folder.path, uri)
        assert sent.ok, sent.reason
    run = tracked["client"].get_run(sent.run_id)
    assert run.data.metrics["step_time_ms"] == 2.0
    assert run.data.metrics["speedup"] == 1.1, "not the larger 2.5 of the answer before"
    assert run.data.tags["autoprec.trials"] == "20"
    mine = f"tags.`mlflow.parentRunId` = '{sent.run_id}' and tags.`best` = 'true'"
    (best,) = tracked["client"].search_runs([sent.experiment_id], mine)
    assert best.data.tags["autoprec.name"] == "search 5", "and no longer the answer before"


def test_a_failed_trial_says_why(tracked: dict[str, Any]) -> None:
    (run,) = tracked_runs(tracked, "tags.`autoprec.number` = '7'")
    assert run.info.status == "FAILED"
    assert run.data.tags["autoprec.reason"] == "loss is NaN"


def test_tags_that_change_later_update_the_same_run(tracked: dict[str, Any]) -> None:
    (run,) = tracked_runs(tracked, "tags.`autoprec.number` = '5'")
    assert run.data.tags["pareto"] == "true"


@pytest.mark.parametrize(("tag", "count"), [("preset", 2), ("finalist", 4), ("pareto", 2), ("pruned", 0)])
def test_trials_can_be_filtered_by_tag(tracked: dict[str, Any], tag: str, count: int) -> None:
    assert len(tracked_runs(tracked, f"tags.`{tag}` = 'true'")) == count


def test_the_study_run_carries_the_winner_table_and_the_files(tracked: dict[str, Any]) -> None:
    run = tracked["client"].get_run(tracked["logged"].run_id)
    note = run.data.tags["mlflow.note.content"]
    assert "| the policy (3 seeds) | 2.50x |" in note
    assert "| preset 2 |" in note
    assert run.data.metrics["speedup"] == 2.5
    assert run.data.params["target"] == "cpu"
    assert [a.path for a in tracked["client"].list_artifacts(run.info.run_id)] == [
        "policy.yaml",
        "report.html",
        "result.json",
    ]
    assert run.info.status == "FINISHED"


def test_the_policy_is_registered_once(tracked: dict[str, Any]) -> None:
    found = tracked["client"].search_model_versions("name='autoprec-demo'")
    (version,) = (version for version in found if version.run_id == tracked["logged"].run_id)
    assert version.source.endswith("/policy.yaml")


def test_a_row_that_is_not_the_answer_says_why_and_the_limits_are_parameters(tracked: dict[str, Any]) -> None:
    rows = {
        run.data.tags["autoprec.name"]: run.data.tags for run in tracked_runs(tracked, "tags.`autoprec.row` = 'policy'")
    }
    assert rows["search 4"]["not_taken"] == "not faster than the answer"
    assert rows["search 5"]["not_taken"] == ""
    assert rows["trial 7"]["not_taken"] == "diverged: loss is NaN"
    params = tracked["client"].get_run(tracked["logged"].run_id).data.params
    assert params["limit.divergence"] == "0.0025"
