"""The table that ``autoprec ui`` opens."""

from __future__ import annotations

import json
from typing import Any

from autoprec.tracking.view import share_key, shared_view, trials_url


def test_the_view_is_filtered_sorted_and_shows_metrics() -> None:
    name, value = shared_view("0123456789abcdef", "demo")
    view = json.loads(value)
    assert name == f"mlflow.sharedViewState.{share_key('0123456789abcdef')}"
    assert view["orderByKey"] == "metrics.`gain`"
    assert view["orderByAsc"] is False
    assert "tags.`autoprec.study` = 'demo'" in view["searchFilter"]
    assert "tags.`autoprec.row` = 'policy'" in view["searchFilter"], "one row per policy: its paired seeds are folded"
    assert view["selectedColumns"][:4] == ["tags.`best`", "tags.`pareto`", "metrics.`gain`", "metrics.`step_ms`"]
    assert "metrics.`divergence_pct`" in view["selectedColumns"]
    assert len(value) < 5000  # the longest experiment tag that MLflow takes


def test_the_address_carries_nothing_but_the_view() -> None:
    assert trials_url("http://h:1/", "7", uid="abc") == "http://h:1/#/experiments/7/runs?viewStateShareKey=autoprecabc"
    assert "orderByKey" in trials_url("http://h:1", "7")


def test_the_view_is_in_the_store(tracked: dict[str, Any]) -> None:
    experiment = tracked["client"].get_experiment(tracked["state"].experiment_id)
    uid = (tracked["runs"] / "demo" / "tracking" / "id").read_text().strip()
    assert f"mlflow.sharedViewState.{share_key(uid)}" in experiment.tags
