"""The table that ``autoprec ui`` opens."""

from __future__ import annotations

import json
from typing import Any

from autoprec.tracking.view import COLUMNS, share_key, shared_view, telling_params, trials_url


def test_the_view_is_filtered_sorted_and_shows_metrics() -> None:
    name, value = shared_view("0123456789abcdef", "demo")
    view = json.loads(value)
    assert name == f"mlflow.sharedViewState.{share_key('0123456789abcdef')}"
    assert view["orderByKey"] == "metrics.`gain`"
    assert view["orderByAsc"] is False
    assert "tags.`autoprec.study` = 'demo'" in view["searchFilter"]
    assert "tags.`autoprec.row` = 'policy'" in view["searchFilter"], "one row per policy: its paired seeds are folded"
    assert view["columnOrder"] == ["attributes.`Run Name`", *view["selectedColumns"]], "what is shown, in that order"
    assert view["selectedColumns"][:2] == ["tags.`best`", "tags.`pareto`"]
    assert set(view["selectedColumns"]) == set(COLUMNS)


def test_the_first_chart_is_time_against_divergence_and_the_loss_is_beside_the_references() -> None:
    view = json.loads(shared_view("0123456789abcdef", "demo", ["layer/head"])[1])
    scatter, losses, parallel, gap = view["compareRunCharts"]
    assert (scatter["type"], scatter["xaxis"]["key"], scatter["yaxis"]["key"]) == (
        "SCATTER",
        "step_ms",
        "divergence_pct",
    )
    assert losses["selectedMetricKeys"] == ["loss", "reference_loss"]
    assert (parallel["selectedParams"], parallel["selectedMetrics"]) == (["layer/head"], ["gain", "divergence_pct"])
    assert gap["metricKey"] == "loss_gap_pct"
    own, other = view["compareRunSections"]
    assert {chart["metricSectionId"] for chart in view["compareRunCharts"]} == {own["uuid"]}
    assert own["display"]
    assert not other["display"], "MLflow's chart per metric is folded"


def test_before_layers_are_known_there_is_no_chart_of_them() -> None:
    assert "PARALLEL" not in shared_view("0123456789abcdef", "demo")[1]


def test_long_names_of_layers_fit_into_the_tag() -> None:
    _, value = shared_view("0123456789abcdef", "study" * 20, [f"layer/{number}{'x' * 240}" for number in range(5)] * 4)
    assert len(value) <= 5000
    assert "PARALLEL" in value


def test_an_axis_is_a_choice_that_differs() -> None:
    runs = [{}, {"layer/a": "bf16", "layer/b": "bf16", "layer/c": "fp8"}, {"layer/a": "fp8", "layer/b": "bf16"}]
    runs += [{"layer/c": "bf16"} | {f"layer/{number}": str(run) for number in range(9)} for run in range(2)]
    assert telling_params(runs)[:2] == ["layer/a", "layer/c"]
    assert len(telling_params(runs)) == 5


def test_a_study_with_variants_has_their_column_and_their_axis_first() -> None:
    runs = [{"layer/a": "bf16", "variant": "as given"}, {"layer/a": "fp8", "variant": "whole"}]
    params = telling_params(runs)
    assert params == ["variant", "layer/a"]
    view = json.loads(shared_view("0123456789abcdef", "demo", params)[1])
    assert view["columnOrder"] == ["attributes.`Run Name`", "params.`variant`", *COLUMNS]
    assert "params.`variant`" not in shared_view("0123456789abcdef", "demo", ["layer/a"])[1]


def test_the_address_carries_nothing_but_the_view() -> None:
    assert trials_url("http://h:1/", "7", "abc").endswith(
        "/7/runs?workflowType=machine_learning&viewStateShareKey=autoprecabc"
    )
    assert trials_url("http://h:1", "7", "abc", charts=True).endswith("=autoprecabc&compareRunsMode=CHART")


def test_the_view_is_in_the_store(tracked: dict[str, Any]) -> None:
    experiment = tracked["client"].get_experiment(tracked["logged"].experiment_id)
    uid = (tracked["runs"] / "demo" / "tracking" / "id").read_text().strip()
    view = json.loads(experiment.tags[f"mlflow.sharedViewState.{share_key(uid)}"])
    parallel = next(chart for chart in view["compareRunCharts"] if chart["type"] == "PARALLEL")
    assert parallel["selectedParams"] == ["layer/h._.mlp"]
