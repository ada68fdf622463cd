"""What is in MLflow afterwards: names it accepts, a run per trial, one answer per study; and nothing twice."""

from __future__ import annotations

import re
import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoprec.tracking import Tracker
from autoprec.tracking.replay import sync
from autoprec.tracking.spool import Spool
from autoprec.tracking.store import Store, _without_stray_folder, safe_key
from autoprec.tuning.study.records import SearchResult
from autoprec.tuning.study.run import metrics_of
from tests.tracking.conftest import make_records, make_result, tracked_runs

pytestmark = pytest.mark.filterwarnings("ignore")


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
    assert run.data.metrics["first_run/step_time_ms"] == 6.0
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
    names = ("divergence", "first_run/divergence")
    assert [row.data.metrics[name] for name in names] == [7e-4, 5e-4], "one figure under both of its names"
    (other,) = tracked_runs(tracked, "tags.`autoprec.row` = 'policy' and tags.`autoprec.name` = 'search 4'")
    told = {name: other.data.metrics[name] for name in ("divergence_pct", "seeds", "gain", "step_ms")}
    assert told == {"divergence_pct": 0.07, "seeds": 2, "gain": 2.08, "step_ms": 4.8}, "its speed is not one run's"


def test_the_gain_of_every_row_is_over_one_16_bit_run(result: SearchResult) -> None:
    """Each trial was told over the 16-bit run as it was known then: 2.0 at first, 1.6 over all its runs."""

    def run(name: str, kind: str, seed: int, speedup: float, **known: float) -> Any:
        tags = {"name": name, "kind": kind, "seed": str(seed), "status": "ok"}
        tags["row"] = "run" if kind == "finalist" else "policy"
        metrics = {"speedup": speedup, "divergence": 1e-4, "step_time_ms": 10 / speedup, **known}
        data = SimpleNamespace(tags={f"autoprec.{key}": value for key, value in tags.items()}, metrics=metrics)
        return SimpleNamespace(data=data, info=SimpleNamespace(run_id=name))

    store: Any = object.__new__(Store)
    logged: dict[str, dict[str, float]] = {}
    store._log = lambda run_id, metrics: logged.update({run_id: {metric.key: metric.value for metric in metrics}})
    trials = [
        run("all bf16", "preset", 0, 2.0, speedup_over_16bit=1.0, gain=1.0),
        run("all bf16", "finalist", 0, 1.2, speedup_over_16bit=1.0),
        run("search 4", "search", 0, 2.4, speedup_over_16bit=1.2, gain=1.2),
        run("search 5", "search", 0, 3.2, speedup_over_16bit=1.6, gain=1.6),
        run("search 5", "finalist", 1, 3.2, speedup_over_16bit=1.6),
        run("search 6", "search", 0, 1.6, speedup_over_16bit=1.0, gain=1.0),
    ]
    reference = {"name": "script as written", "speedup": 1.0, "speedup_over_16bit": 1 / 1.6}
    presets = ({"name": "all bf16", "speedup": 1.6, "speedup_over_16bit": 1.0},)
    store._fold(trials, replace(result, best=reference, reference=reference, presets=presets), 1)
    assert (logged["search 5"]["speedup_over_16bit"], logged["search 5"]["first_run/speedup_over_16bit"]) == (2.0, 1.6)
    folded = {**trials[3].data.metrics, **logged["search 5"]}
    again = replace(result, best=reference, reference=reference, presets=presets)
    trials[3].data.metrics = folded
    store._fold(trials, again, 2)
    assert {**folded, **logged["search 5"]} == folded, "a resumed study pools the runs, not what was pooled"
    gains = {name: figures["gain"] for name, figures in logged.items()}
    assert gains == {"all bf16": 1.0, "search 4": 1.5, "search 5": 2.0}


def test_a_resumed_study_shows_one_answer_and_the_trials_it_was_given(
    tmp_path: Path, tracked: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Tracker, "_start", lambda _: None)  # what the background process does is done here, by `sync`
    uri = tracked["state"].tracking_uri
    records = make_records()
    first = make_result(records)
    second = replace(first, best={**first.best, "step_time_ms": 2.0, "speedup": 1.1, "name": "search 5"})
    for trials, result in ((10, first), (20, second)):
        with Tracker.open(tmp_path / "again", study="again", tracking_uri=uri) as tracker:
            tracker.study_started({"trials": trials})
            tracker.finished(result)
            tracker.close(0)
        (sent,) = sync(tmp_path, tracking_uri=uri)
        assert sent.ok, sent.reason
    from mlflow.tracking import MlflowClient

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run = MlflowClient(tracking_uri=uri).get_run(Spool.of(tmp_path / "again").load_state(uri).run_id)
    assert run.data.metrics["step_time_ms"] == 2.0
    assert run.data.metrics["speedup"] == 1.1, "not the larger 2.5 of the answer before"
    assert run.data.tags["autoprec.trials"] == "20"


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
    run = tracked["client"].get_run(tracked["state"].run_id)
    note = run.data.tags["mlflow.note.content"]
    assert "| **the policy** (3 seeds) | 2.50x |" in note
    assert "preset: preset 2" in note
    assert run.data.metrics["speedup"] == 2.5
    assert run.data.params["target"] == "cpu"
    assert [a.path for a in tracked["client"].list_artifacts(run.info.run_id)] == ["policy.yaml", "report.html"]
    assert run.info.status == "FINISHED"


def test_the_policy_is_registered_once(tracked: dict[str, Any]) -> None:
    (version,) = tracked["client"].search_model_versions("name='autoprec-demo'")
    assert version.run_id == tracked["state"].run_id
    assert version.source.endswith("/policy.yaml")


def test_on_a_gpu_every_gain_of_the_table_is_over_the_16bit_run(tmp_path: Path) -> None:
    records = make_records()
    over = {
        number: records[number].metrics | metrics_of({"speedup_over_16bit": gain})
        for number, gain in ((2, 1.0), (4, 1.3333))
    }
    records = [replace(r, metrics=over.get(r.number, r.metrics)) for r in records]
    result = make_result(records)
    result = replace(
        result,
        target="h100",
        best={**result.best, "speedup_over_16bit": 2.0},
        reference={**result.reference, "speedup_over_16bit": 0.1},
    )
    with Tracker.open(tmp_path / "runs" / "gpu", study="gpu") as tracker:
        tracker.study_started({})
        for record in (records[0], records[2], records[4]):
            tracker.trial(record)
        tracker.finished(result)
        state = tracker.close(120)
    assert state.status == "drained", state.reason
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=state.tracking_uri)
    found = client.search_runs([state.experiment_id])
    gains = {run.data.tags.get("autoprec.number", "study"): run.data.metrics["gain"] for run in found}
    assert gains == {"study": 2.0, "0": 0.1, "2": 1.0, "4": 1.33}
    note = client.get_run(state.run_id).data.tags["mlflow.note.content"]
    assert "| what | over 16-bit | over the script |" in note
    assert "| **the policy** | 2.00x | 2.50x |" in note


@pytest.mark.parametrize("there", [False, True])
def test_the_empty_folder_that_mlflow_makes_of_a_quoted_name_does_not_stay(tmp_path: Path, there: bool) -> None:
    stray = tmp_path / "q%3Fx" / "autoprec-runs"
    if there:
        stray.mkdir(parents=True)
    with _without_stray_folder(f"sqlite:///{stray}/mlflow.db"):
        stray.mkdir(parents=True, exist_ok=True)
    assert stray.exists() == there
    assert tmp_path.exists()
