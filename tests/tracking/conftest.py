"""A small study, and one store that it was tracked into (made once: a new SQLite store takes seconds)."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import pytest

from autoprec.tracking import Tracker
from autoprec.tuning.study.records import SearchResult
from autoprec.tuning.study.run import Run, metrics_of

POLICY = {
    "schema": "autoprec.policy/1",
    "recipes": {"bf16": {"format": "bf16"}},
    "layers": [{"match": "h.*.attn", "recipe": "bf16"}],
    "default": "keep",
}


def make_records() -> list[Run]:
    base = Run(0, "reference", "reference", {}, {}, "ok", started=1_700_000_000.0, seconds=2.0)
    reference = tuple(4.0 - 0.1 * step for step in range(10))
    kinds = ["reference", "noise", "preset", "preset", "search", "search", "finalist"]
    out = []
    for number, kind in enumerate(kinds):
        metrics = {"step_time_ms": 10.0 - number, "speedup": 10.0 / (10.0 - number), "divergence": 1e-4 * number}
        out.append(
            replace(
                base,
                number=number,
                kind=kind,
                name=f"{kind} {number}",
                params={"layer:h.*.attn": "bf16", "fp8.amax_history_len": 16} if number > 1 else {},
                policy=POLICY if number > 1 else {},
                metrics=metrics_of(metrics if kind != "noise" else {}),
                losses=tuple(loss * (1 + 1e-3 * number) for loss in reference),
                reference_losses=reference,
                tags=("pareto",) if number == 4 else (),
                seed=1 if kind == "finalist" else 0,
            )
        )
    failed = replace(
        base, number=7, kind="search", name="trial 7", status="diverged", reason="loss is NaN", tail="boom"
    )
    return [*out, failed]


def make_result(records: list[Run]) -> SearchResult:
    def row(record: Run) -> dict[str, Any]:
        return {**record.figures, "name": record.name, "sources": dict(record.sources)}

    return SearchResult(
        verdict="adopt",
        reason="2.50x faster, inside the noise floor",
        policy="policy.yaml",
        best={**row(records[6]), "interval": 2e-4, "noise_floor": 4e-4},
        reference=row(records[0]),
        presets=tuple(row(r) for r in records if r.kind == "preset"),
        front=tuple(row(r) for r in (records[4], records[6])),
        trials={"complete": 6, "failed": 1, "pruned": 0},
        study_name="demo",
        storage="sqlite:///study.db",
        mlflow={},
        seconds=90.0,
        target="cpu",
        script="train.py",
        budget={"max_divergence": 0.0025},
        explanation={
            "layers": [{"layers": "h.*.mlp (2)", "choice": "fp8", "text": "fp8: saves 3 ms | adds little"}],
            "importance": [{"name": "layer:h.0.mlp", "time_share": 0.5, "error_share": 0.25}],
        },
    )


@pytest.fixture
def records() -> list[Run]:
    return make_records()


@pytest.fixture
def result(records: list[Run]) -> SearchResult:
    return make_result(records)


@pytest.fixture(scope="session")
def tracked(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A study tracked to its end through the background process, into its default store."""
    runs = tmp_path_factory.mktemp("autoprec-runs")
    report = runs / "report.html"
    report.write_text("<p>report</p>", encoding="utf-8")
    policy = runs / "policy.yaml"
    policy.write_text("schema: autoprec.policy/1\n", encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME"):
            patch.delenv(name, raising=False)
        records = make_records()
        tracker = Tracker.open(runs / "demo", study="demo")
        tracker.study_started({"script": ["train.py", "--api-key", "s3cret", "--lr=1"], "target": "cpu", "groups": 3})
        for record in records:
            groups = {"h.*.attn": "bf16", "h.*.mlp": "fp8" if record.kind == "search" else "bf16"}
            tracker.trial(record, groups if record.params else None)
        own = make_result(records)
        further = [("search 5", 1, 6e-4), ("search 5", 2, 1e-3), ("search 4", 1, 1e-3)]
        for number, (name, seed, gap) in enumerate(further, start=8):
            record = replace(records[6], name=name, number=number, seed=seed)
            records.append(replace(record, metrics=record.metrics | metrics_of({"divergence": gap})))
            tracker.trial(records[-1])
        best = {**own.best, "name": "search 5", "divergence": 7e-4, "seeds": 3}
        tracker.trial(replace(records[5], tags=("pareto", "best")))
        tracker.finished(replace(own, best=best), [policy, report])
        state = tracker.close(120)
        reference = tracker.reference()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from mlflow.tracking import MlflowClient

        client = MlflowClient(tracking_uri=state.tracking_uri)
    return {"runs": runs, "client": client, "state": state, "reference": reference, "records": records}


def tracked_runs(tracked: dict[str, Any], condition: str = "") -> list[Any]:
    """Return the runs of the tracked study that meet a condition; other tests write other studies beside it."""
    own = " and ".join(filter(None, ("tags.`autoprec.study` = 'demo'", condition)))
    experiment = tracked["state"].experiment_id
    return list(tracked["client"].search_runs([experiment], filter_string=own, max_results=100))
