from __future__ import annotations

import contextlib
import gc
import resource
import sqlite3
from dataclasses import replace
from pathlib import Path

import optuna
import pytest
from optuna.storages._rdb.models import TrialModel
from optuna.storages._rdb.storage import RDBStorage

from autoprec.errors import AutoPrecError, StudyError
from autoprec.tuning.study.run import Run, metrics_of
from autoprec.tuning.study.study import StudyStore, default_storage
from tests.stores import WHOLE

SPACE = {f"layer:{i}": optuna.distributions.CategoricalDistribution(("keep", "bf16")) for i in range(4)}
OBJECTIVES = ("step_time_ms", "divergence")


def store(folder: Path, *, resume: bool = False) -> StudyStore:
    return StudyStore(default_storage(folder), "study", OBJECTIVES, resume=resume)


def record(number: int, params: dict[str, str], status: str = "ok", kind: str = "search") -> Run:
    metrics = {"step_time_ms": 10 + number, "divergence": 0.001} if status == "ok" else {}
    return Run(number, kind, f"trial {number}", params, {"schema": "x"}, status, metrics=metrics_of(metrics))


def run(target: StudyStore, count: int) -> list[dict[str, str]]:
    asked = []
    for _ in range(count):
        trial = target.ask()
        asked.append(dict(trial.params))
        target.tell(trial, record(target.next_number(), dict(trial.params)))
    return asked


def test_presets_are_asked_first_and_by_name(tmp_path: Path) -> None:
    study = store(tmp_path)
    low = dict.fromkeys(SPACE, "bf16")
    study.start(optuna.samplers.RandomSampler(seed=0), SPACE, [("all bf16", low)])
    trial = study.ask()
    assert trial.params == low
    assert trial.user_attrs["preset"] == "all bf16"


def test_finished_trials_survive_and_are_replayed(tmp_path: Path) -> None:
    first = store(tmp_path)
    first.start(optuna.samplers.RandomSampler(seed=0), SPACE, [])
    asked = run(first, 5)
    second = store(tmp_path, resume=True)
    second.start(optuna.samplers.RandomSampler(seed=0), SPACE, [("done before", asked[0])])
    assert [r.params for r in second.learned()] == asked
    assert [second.next_number(), second.next_number()] == [5, 6], "a run that has not ended keeps its number"
    assert "preset" not in second.ask().user_attrs


@pytest.mark.parametrize(
    ("limit", "most", "code"), [(resource.RLIMIT_FSIZE, 40_960, 6), (resource.RLIMIT_NOFILE, 0, 1)]
)
def test_a_limit_of_the_process_is_not_taken_for_a_lost_database(
    tmp_path: Path, limit: int, most: int, code: int
) -> None:
    usual = resource.getrlimit(limit)
    (tmp_path / "warm").mkdir()
    store(tmp_path / "warm")  # everything is imported
    resource.setrlimit(limit, (most, usual[1]))
    try:
        with pytest.raises(AutoPrecError, match="limit") as caught:
            store(tmp_path)
    finally:
        resource.setrlimit(limit, usual)
    assert caught.value.exit_code == code


def test_nothing_is_left_running_by_a_driver_that_dies_between_ask_and_tell(tmp_path: Path) -> None:
    first = store(tmp_path)
    first.start(optuna.samplers.RandomSampler(seed=0), SPACE, [])
    run(first, 2)
    first.ask()
    study = optuna.load_study(study_name="study", storage=default_storage(tmp_path))
    assert [t.state for t in study.trials] == [optuna.trial.TrialState.COMPLETE] * 2


def test_failures_and_prunings_are_counted_as_such(tmp_path: Path) -> None:
    study = store(tmp_path)
    study.start(optuna.samplers.RandomSampler(seed=0), SPACE, [])
    for status in ("ok", "oom", "pruned", "diverged"):
        trial = study.ask()
        study.tell(trial, record(study.next_number(), dict(trial.params), status))
    study.add(record(study.next_number(), {}, kind="finalist"))
    assert study.count() == {"complete": 1, "failed": 2, "pruned": 1}


def test_a_duplicate_is_answered_without_being_stored(tmp_path: Path) -> None:
    study = store(tmp_path)
    study.start(optuna.samplers.RandomSampler(seed=0), SPACE, [])
    run(study, 1)
    trial = study.ask()
    study.forget(trial, study.learned()[0])
    assert len(store(tmp_path, resume=True).records) == 1


def test_integer_metrics_do_not_reach_optuna_as_integers(tmp_path: Path) -> None:
    study = store(tmp_path)
    study.start(optuna.samplers.TPESampler(seed=0, n_startup_trials=1), SPACE, [])
    run(study, 4)


def test_the_signature_is_kept(tmp_path: Path) -> None:
    study = store(tmp_path)
    assert study.signature is None
    study.set_signature({"steps": 20})
    assert store(tmp_path, resume=True).signature == {"steps": 20}


def test_existing_and_missing_studies(tmp_path: Path) -> None:
    with pytest.raises(StudyError, match="no study named"):
        store(tmp_path, resume=True)
    store(tmp_path)
    with pytest.raises(StudyError, match="exists already"):
        store(tmp_path)


def test_a_study_that_is_given_up_leaves_no_connection_open(tmp_path: Path) -> None:
    study = store(tmp_path)
    pool = study._storage.engine.pool
    before = len(pool._pool.queue)
    del study
    gc.collect()
    assert before > 0
    assert not pool._pool.queue


@pytest.mark.parametrize("damage", [b"", b"this is not a database, and long enough to be read as one" * 40])
def test_a_damaged_file_is_a_study_error(tmp_path: Path, damage: bytes) -> None:
    study = store(tmp_path)
    study.start(optuna.samplers.RandomSampler(seed=0), SPACE, [])
    run(study, 1)
    path = tmp_path / "study.db"
    whole = path.read_bytes()
    path.write_bytes(damage or whole[: len(whole) // 2])
    with pytest.raises(StudyError, match=r"cannot be used|damaged or truncated"):
        store(tmp_path, resume=True)


def test_each_trial_is_one_transaction(tmp_path: Path) -> None:
    study = store(tmp_path)
    study.start(optuna.samplers.RandomSampler(seed=0), SPACE, [])
    trial = study.ask()
    path = tmp_path / "study.db"
    with contextlib.closing(sqlite3.connect(path)) as before:
        assert before.execute("select count(*) from trials").fetchone() == (0,)
    study.tell(trial, record(0, dict(trial.params)))
    with contextlib.closing(sqlite3.connect(path)) as after:
        assert after.execute("select count(*) from trials").fetchone() == (1,)
        assert after.execute("select count(*) from trial_params").fetchone() == (len(SPACE),)


def test_what_tests_store_with_fewer_statements_is_what_optuna_stores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stored(folder: Path) -> dict[str, list[tuple[object, ...]]]:
        folder.mkdir()
        target = store(folder)
        target.start(optuna.samplers.RandomSampler(seed=0), SPACE, [("all bf16", dict.fromkeys(SPACE, "bf16"))])
        run(target, 3)
        target.add(record(target.next_number(), {"layer:0": "keep"}, "crashed", kind="finalist"))
        target.close()
        columns = {
            "trials": "number, study_id, state",
            "trial_params": "trial_id, param_name, param_value, distribution_json",
            "trial_values": "trial_id, objective, value, value_type",
            "trial_user_attributes": "trial_id, key, value_json",
            "trial_system_attributes": "trial_id, key, value_json",
        }
        with contextlib.closing(sqlite3.connect(folder / "study.db")) as database:
            return {name: sorted(database.execute(f"select {what} from {name}")) for name, what in columns.items()}

    less = stored(tmp_path / "less")
    assert WHOLE, "tests/conftest.py has them ask less"
    monkeypatch.setattr(TrialModel, "find_or_raise_by_id", WHOLE["find"])
    monkeypatch.setattr(RDBStorage, "_set_trial_param_without_commit", WHOLE["set_param"])
    monkeypatch.setattr(RDBStorage, "_set_trial_attr_without_commit", WHOLE["set_attr"])
    assert stored(tmp_path / "whole") == less
    assert len(less["trials"]) == 4
    assert len(less["trial_params"]) >= 3 * len(SPACE)
    assert less["trial_user_attributes"]


def test_optuna_sees_every_parameter_of_a_large_study(tmp_path: Path) -> None:
    wide = {f"layer:{i}": optuna.distributions.CategoricalDistribution(("keep", "bf16", "fp8")) for i in range(60)}
    wide["fp8_delayed.scaling.margin"] = optuna.distributions.CategoricalDistribution((0, 1))
    study = store(tmp_path)
    study.start(optuna.samplers.RandomSampler(seed=0), wide, [])
    asked = run(study, 4)
    seen = optuna.load_study(study_name="study", storage=default_storage(tmp_path))
    assert [trial.params for trial in seen.get_trials()] == asked
    frame = seen.trials_dataframe()
    assert {f"params_{name}" for name in wide} <= set(frame.columns)
    assert {f"values_{name}" for name in study.objectives} <= set(frame.columns)
    assert frame[[f"params_{name}" for name in wide]].notna().all().all()
    again = store(tmp_path, resume=True)
    again.start(optuna.samplers.RandomSampler(seed=0), wide, [])
    assert set(again.ask().params) == set(wide)


@pytest.mark.filterwarnings("ignore:PedAnovaImportanceEvaluator:UserWarning")
def test_optuna_shows_objectives_and_figures_by_name(tmp_path: Path) -> None:
    study = store(tmp_path)
    study.start(optuna.samplers.RandomSampler(seed=0), SPACE, [])
    reference = record(0, {}, kind="reference")
    study.add(replace(reference, name="reference", started=1_700_000_000.0, seconds=2.5))
    for number in range(1, 9):
        trial = study.ask()
        told = record(number, dict(trial.params))
        figures = {"step_time_ms": float(list(trial.params.values()).count("keep")), "divergence": number / 1e4}
        more = {"speedup": 1.5, "memory_bytes": 2 * 2**30, "gradient_error": float("nan")}
        study.tell(trial, replace(told, metrics=metrics_of({**figures, **more})))
    seen = optuna.load_study(study_name="study", storage=default_storage(tmp_path))
    assert seen.metric_names == list(OBJECTIVES)
    frame = seen.trials_dataframe()
    assert frame["user_attrs_step_time_ms"][0] == 10.0, "the reference has its row, and no parameters"
    assert frame["state"][0] == "FAIL", "or the dashboard would draw no parameter"
    assert frame["duration"][0].total_seconds() == 2.5
    trials = frame[frame["state"] == "COMPLETE"]
    assert len(trials) == 8
    assert (trials["user_attrs_memory_bytes"] == 2 * 2**30).all()
    assert trials["user_attrs_speedup"].dtype == float
    assert "user_attrs_gradient_error" not in frame
    importance = optuna.importance.get_param_importances(
        seen, evaluator=optuna.importance.FanovaImportanceEvaluator(n_trees=2), target=lambda trial: trial.values[0]
    )
    assert set(importance) == set(SPACE)
    assert {trial.user_attrs["kind"] for trial in seen.best_trials} == {"search"}
    study.add(replace(record(9, dict(trial.params), kind="finalist"), name="again"))
    drawn = [t for t in seen.get_trials() if t.state != optuna.trial.TrialState.FAIL]
    assert all(set(t.params) == set(SPACE) for t in drawn)
    again = store(tmp_path, resume=True)
    assert again.records[0].name == "reference"
    again.add(record(10, {}))
    assert len(again.records) == 11


def test_a_study_begun_before_objectives_had_names_gets_them(tmp_path: Path) -> None:
    optuna.create_study(study_name="study", storage=default_storage(tmp_path), directions=["minimize"] * 2)
    store(tmp_path, resume=True)
    seen = optuna.load_study(study_name="study", storage=default_storage(tmp_path))
    assert seen.metric_names == list(OBJECTIVES)


def test_the_time_of_all_sessions_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A resumed study told the seconds of its last session as those of the search."""
    clock = [100.0]
    monkeypatch.setattr("autoprec.tuning.study.study.time.monotonic", lambda: clock[0])
    url = f"sqlite:///{tmp_path}/study.db"
    first = StudyStore(url, "s", ("step_time_ms", "divergence"), resume=False)
    clock[0] += 30.0
    first.add(Run(0, "search", "trial 1", {}, {}, "ok", metrics=metrics_of({"step_time_ms": 1.0, "divergence": 0.0})))
    clock[0] += 5.0
    first.close()
    assert (first.seconds(), first.sessions) == (35.0, 1)
    clock[0] += 1000.0
    again = StudyStore(url, "s", ("step_time_ms", "divergence"), resume=True)
    clock[0] += 7.0
    assert (again.seconds(), again.sessions) == (42.0, 2)
    again.close()
