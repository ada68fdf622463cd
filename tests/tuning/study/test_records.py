"""Records and results survive JSON: the report, the tracker and ``--json`` read nothing else."""

import json
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoprec.errors import FileError
from autoprec.tuning.study.records import BY_BLOCK, SearchResult, TrialRecord, pooled

NUMBERS = st.floats(allow_nan=False, allow_infinity=False, width=32)


@given(
    st.builds(
        TrialRecord,
        number=st.integers(0, 1000),
        kind=st.sampled_from(["reference", "noise", "preset", "search", "finalist"]),
        name=st.text(max_size=8),
        params=st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=3),
        policy=st.just({}),
        status=st.sampled_from(["ok", "oom"]),
        metrics=st.dictionaries(st.sampled_from(["speedup", "divergence"]), NUMBERS),
        losses=st.lists(NUMBERS, max_size=3).map(tuple),
        tags=st.lists(st.sampled_from(["best", "pareto"]), max_size=2).map(tuple),
    )
)
def test_a_record_survives(record: TrialRecord) -> None:
    assert TrialRecord.from_json(json.loads(json.dumps(record.to_json(), allow_nan=False))) == record
    assert record.ok == (record.status == "ok")


def test_losses_that_are_no_numbers_are_null() -> None:
    record = TrialRecord(0, "search", "x", {}, {}, "diverged", losses=(1.0, math.inf))
    assert record.to_json()["losses"] == [1.0, None]
    assert math.isnan(TrialRecord.from_json(record.to_json()).losses[1])


def _run(
    kind: str, seed: int, speedup: float, gap: float, status: str = "ok", tags: tuple[str, ...] = ()
) -> TrialRecord:
    metrics = {"speedup": speedup, "step_time_ms": 100 / speedup, "throughput": 10 * speedup, "divergence": gap}
    return TrialRecord(seed, kind, "fp8", {}, {}, status, metrics=metrics, tags=tags, seed=seed)


def test_the_figures_of_a_policy_are_those_of_all_its_runs() -> None:
    trial = _run("preset", 0, 2.0, 0.001)
    assert pooled([trial])["fp8"] is trial
    runs = [_run("finalist", 1, 2.4, 0.004), _run("finalist", 2, 2.2, 0.001), _run("finalist", 3, 9.0, 9.0, "oom")]
    benign, script = replace(trial, kind="noise", name="rounded"), replace(trial, kind="reference", name="script")
    found = pooled([*runs, trial, benign, script])
    assert list(found) == ["fp8"]
    assert (found["fp8"].kind, found["fp8"].seed) == ("preset", 0)
    expected = {"speedup": 2.2, "step_time_ms": 100 / 2.2, "throughput": 22.0, "divergence": 0.002, "seeds": 3}
    assert found["fp8"].metrics == pytest.approx(expected)


def test_times_of_runs_that_compiled_blocks_give_way_to_those_of_the_whole_model() -> None:
    trial, whole = _run("search", 0, 2.0, 0.001, tags=(BY_BLOCK,)), _run("finalist", 1, 1.5, 0.003)
    assert pooled([trial, replace(trial, kind="finalist", seed=1)])["fp8"].metrics["speedup"] == 2.0
    found = pooled([trial, whole])["fp8"].metrics
    assert (found["speedup"], found["divergence"]) == (1.5, pytest.approx(0.002))
    again = replace(whole, seed=0)  # what is adopted is compiled as a whole under the script's own seed
    found = pooled([trial, replace(trial, kind="finalist", seed=1), again])["fp8"].metrics
    assert (found["speedup"], found["seeds"]) == (1.5, 2.0)
    assert found["divergence"] == pytest.approx((0.001 + 0.003) / 2)


def test_a_result_survives_and_has_the_keys_that_programs_read() -> None:
    result = SearchResult(
        "adopt",
        "because",
        "policy.yaml",
        {"speedup": 2.0},
        {},
        ({"name": "bf16"},),
        (),
        {"complete": 3},
        "s",
        "u",
        {},
        1.5,
    )
    document = json.loads(json.dumps(result.to_json()))
    assert SearchResult.from_json(document) == result
    documented = ("verdict", "reason", "policy", "best", "reference", "presets", "front", "trials", "study", "storage")
    assert set(document) >= {*documented, "mlflow", "seconds"}


def test_a_stored_record_is_refused_when_it_is_not_what_was_stored() -> None:
    record = TrialRecord(3, "search", "x", {}, {}, "ok", metrics={"speedup": 1.25, "divergence": math.nan})
    stored = json.loads(json.dumps(record.to_stored()))
    assert TrialRecord.from_stored(stored).metrics["speedup"] == 1.25
    stored["metrics"]["speedup"] = 1.5
    with pytest.raises(FileError, match="trial 3: is damaged"):
        TrialRecord.from_stored(stored, where="trial 3")


def test_what_the_script_said_is_kept_without_its_secrets() -> None:
    record = TrialRecord(0, "search", "x", {}, {}, "crashed", reason="login token=abc failed", tail="--api-key s3cr3t")
    assert "abc" not in record.reason
    assert "s3cr3t" not in json.dumps(record.to_stored())
