"""A small study, and one store that it was tracked into (made once: a new SQLite store takes seconds)."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autoprec.support.redact import redact_arguments
from autoprec.tracking.listener import TrackingListener
from autoprec.tracking.study import About, TrackedStudy, default_uri
from autoprec.tuning.events import SearchInfo
from autoprec.tuning.study.records import SearchResult
from autoprec.tuning.study.run import Run, metrics_of
from autoprec.tuning.study.study import StudyStore, default_storage

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
        },
    )


@pytest.fixture
def records() -> list[Run]:
    return make_records()


@pytest.fixture
def result(records: list[Run]) -> SearchResult:
    return make_result(records)


def make_study(
    folder: Path, records: Sequence[Run] = (), result: SearchResult | None = None, **about: Any
) -> TrackedStudy:
    """Make the folder of a study as a search leaves it; without a result as one that was killed."""
    folder.mkdir(parents=True, exist_ok=True)
    store = StudyStore(default_storage(folder), folder.name, ("step_time_ms", "divergence"), resume=False)
    for record in records:
        store.add(record)
    store.close()
    made = TrackedStudy(folder)
    made.save_about(About(folder.name, **{"started": 1_700_000_000.0, **about}))
    if result is not None:
        made.save_outcome(result)
    return made


@pytest.fixture(scope="session")
def tracked(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A study tracked to its end through a search's listener, into its default store."""
    runs = tmp_path_factory.mktemp("autoprec-runs")
    policy = runs / "policy.yaml"
    policy.write_text("schema: autoprec.policy/1\n", encoding="utf-8")
    records = [*make_records()]
    for number, record in enumerate(records):
        choice = {"layer:h.*.mlp": "fp8" if record.kind == "search" else "bf16"} if record.params else {}
        records[number] = replace(record, params=record.params | choice)
    own = make_result(records)
    further = [("search 5", 1, 6e-4), ("search 5", 2, 1e-3), ("search 4", 1, 1e-3)]
    for number, (name, seed, gap) in enumerate(further, start=8):
        record = replace(records[6], name=name, number=number, seed=seed)
        records.append(replace(record, metrics=record.metrics | metrics_of({"divergence": gap})))
    best = {**own.best, "name": "search 5", "divergence": 7e-4, "seeds": 3}
    result = replace(own, best=best, policy=str(policy), front=({"name": "search 4"}, {"name": "search 5"}))
    script = ("train.py", "--api-key", "s3cret", "--lr=1")
    info = SearchInfo(
        "demo", str(runs / "demo"), "", "train.py", "cpu", "measured", "fork", "cpu", {}, {}, 3, "autoprec search",
        options={"script": script},
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        for name in ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME"):
            patch.delenv(name, raising=False)
        make_study(runs / "demo", records)
        warnings.simplefilter("ignore")  # of MLflow, in the listener's thread
        listener = TrackingListener(runs)
        listener.started(replace(info, script=" ".join(redact_arguments(script))))
        for record in records:
            listener.trial(record, 1, 3, None, 0.0)
        listener._patience_s = 240.0
        attached = listener.attach(result, runs / "demo")
        (runs / "demo" / "report.html").write_text("<p>report</p>", encoding="utf-8")
        listener.close(240.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from mlflow.tracking import MlflowClient

        client = MlflowClient(tracking_uri=default_uri(runs))
    logged = listener._logged
    return {"runs": runs, "client": client, "logged": logged, "mlflow": attached.mlflow, "records": records}


def tracked_runs(tracked: dict[str, Any], condition: str = "") -> list[Any]:
    """Return the runs of the tracked study that meet a condition; other tests write other studies beside it."""
    own = " and ".join(filter(None, ("tags.`autoprec.study` = 'demo'", condition)))
    experiment = tracked["logged"].experiment_id
    return list(tracked["client"].search_runs([experiment], filter_string=own, max_results=100))
