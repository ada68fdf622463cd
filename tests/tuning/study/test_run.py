"""Runs survive JSON and the database, with their sources and intervals."""

import json
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoprec.errors import StudyError
from autoprec.tuning.study.run import BY_BLOCK, DUEL, METRICS, Metric, Run, last_duels, metrics_of, pooled

NUMBERS = st.floats(allow_nan=False, allow_infinity=False, width=32)
METRIC = st.builds(Metric, NUMBERS, st.sampled_from(["measured", "modelled"]), st.none() | NUMBERS, st.none() | NUMBERS)


@given(
    st.builds(
        Run,
        number=st.integers(0, 1000),
        kind=st.sampled_from(["reference", "noise", "preset", "search", "finalist"]),
        name=st.text(max_size=8),
        params=st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=3),
        policy=st.just({}),
        status=st.sampled_from(["ok", "oom"]),
        metrics=st.dictionaries(st.sampled_from(["speedup", "divergence"]), METRIC),
        losses=st.lists(NUMBERS, max_size=3).map(tuple),
        metric=st.sampled_from(["", "f1"]),
        higher=st.booleans(),
        values=st.lists(NUMBERS, max_size=3).map(tuple),
        reference_values=st.lists(NUMBERS, max_size=3).map(tuple),
        tags=st.lists(st.sampled_from(["best", "pareto"]), max_size=2).map(tuple),
    )
)
def test_a_record_survives(record: Run) -> None:
    assert Run.from_json(json.loads(json.dumps(record.to_json(), allow_nan=False))) == record
    assert record.ok == (record.status == "ok")
    sign = -1 if record.higher else 1
    assert record.curve == (tuple(sign * v for v in record.values) if record.metric else record.losses)
    assert len(record.reference_curve) == len(record.reference_values if record.metric else ())


def test_losses_that_are_no_numbers_are_null() -> None:
    record = Run(0, "search", "x", {}, {}, "diverged", losses=(1.0, math.inf))
    assert record.to_json()["losses"] == [1.0, None]
    assert math.isnan(Run.from_json(record.to_json()).losses[1])


def _run(kind: str, seed: int, speedup: float, gap: float, status: str = "ok", tags: tuple[str, ...] = ()) -> Run:
    metrics = {"speedup": speedup, "step_time_ms": 100 / speedup, "throughput": 10 * speedup, "divergence": gap}
    return Run(seed, kind, "fp8", {}, {}, status, metrics=metrics_of(metrics), tags=tags, seed=seed)


def test_the_figures_of_a_policy_are_those_of_all_its_runs() -> None:
    trial = _run("preset", 0, 2.0, 0.001)
    assert pooled([trial])["fp8"] is trial
    runs = [_run("finalist", 1, 2.4, 0.004), _run("finalist", 2, 2.2, 0.001), _run("finalist", 3, 9.0, 9.0, "oom")]
    benign, script = replace(trial, kind="noise", name="rounded"), replace(trial, kind="reference", name="script")
    found = pooled([*runs, trial, benign, script])
    assert list(found) == ["fp8"]
    assert (found["fp8"].kind, found["fp8"].seed) == ("preset", 0)
    expected = {"speedup": 2.2, "step_time_ms": 100 / 2.2, "throughput": 22.0, "divergence": 0.002, "seeds": 3}
    assert found["fp8"].figures == pytest.approx(expected)


def test_times_of_runs_that_compiled_blocks_give_way_to_those_of_the_whole_model() -> None:
    trial, whole = _run("search", 0, 2.0, 0.001, tags=(BY_BLOCK,)), _run("finalist", 1, 1.5, 0.003)
    assert pooled([trial, replace(trial, kind="finalist", seed=1)])["fp8"]["speedup"] == 2.0
    found = pooled([trial, whole])["fp8"]
    assert (found["speedup"], found["divergence"]) == (1.5, pytest.approx(0.002))
    again = replace(whole, seed=0)  # what is adopted is compiled as a whole under the script's own seed
    found = pooled([trial, replace(trial, kind="finalist", seed=1), again])["fp8"]
    assert (found["speedup"], found["seeds"]) == (1.5, 2.0)
    assert found["divergence"] == pytest.approx((0.001 + 0.003) / 2)


def _duel(name: str, speed: float, *tags: str) -> Run:
    metrics = {
        "speedup": Metric(speed, low=speed - 0.1, high=speed + 0.1),
        "step_time_ms": Metric(100 / speed, low=90 / speed, high=110 / speed),
    }
    return Run(0, DUEL, name, {}, {}, "ok", metrics=metrics, tags=tags)


def test_duels_of_whole_models_stand_and_say_how_far_those_of_blocks_are_off() -> None:
    blocks = [_duel("a", 2.0, BY_BLOCK), _duel("b", 1.5, BY_BLOCK)]
    assert [run["speedup"] for run in last_duels(blocks).values()] == [2.0, 1.5]
    found = last_duels([*blocks, _duel("a", 1.8)])
    assert found["a"]["speedup"] == 1.8
    assert found["b"].metrics["speedup"].value == pytest.approx(1.35)
    assert found["b"].metrics["speedup"].low == pytest.approx(1.26)
    assert found["b"]["step_time_ms"] == pytest.approx(100 / 1.35)
    later = last_duels([*blocks, _duel("a", 1.8), _duel("a", 2.2, BY_BLOCK)])
    assert later["a"]["speedup"] == 1.8, "blocks that are timed later change nothing of it"
    trial = replace(_run("search", 0, 1.6, 0.001, tags=(BY_BLOCK,)), name="b")
    runs = [trial, *blocks, _duel("a", 1.8)]
    assert pooled(runs)["b"]["speedup"] == pytest.approx(1.35)
    assert pooled(runs)["b"].intervals == {}, "by blocks it is ranked, and no interval of the whole model is known"
    assert pooled(runs, to_rank=True)["b"].metrics["speedup"].low == pytest.approx(1.26)
    assert pooled([replace(trial, name="a"), *runs])["a"].metrics["speedup"].low == pytest.approx(1.7)


def test_a_stored_record_is_refused_when_it_is_not_what_was_stored() -> None:
    record = Run(3, "search", "x", {}, {}, "ok", metrics=metrics_of({"speedup": 1.25, "divergence": math.nan}))
    stored = json.loads(json.dumps(record.to_stored()))
    assert Run.from_stored(stored, where="trial 3")["speedup"] == 1.25
    assert stored["record"]["metrics"].keys() == {"divergence"}, "what is finite is an attribute, and held once"
    stored["speedup"] = 1.5
    with pytest.raises(StudyError, match="trial 3: is damaged"):
        Run.from_stored(stored, where="trial 3")


def test_what_the_script_said_is_kept_without_its_secrets() -> None:
    record = Run(0, "search", "x", {}, {}, "crashed", reason="login token=abc failed", tail="--api-key s3cr3t")
    assert "abc" not in record.reason
    assert "s3cr3t" not in json.dumps(record.to_stored())


def test_a_run_stored_before_intervals_were_known_is_read() -> None:
    old = {"number": 1, "kind": "search", "name": "x", "params": {}, "policy": {}, "status": "ok"}
    old |= {"metrics": {"speedup": 1.5, "divergence": 0.001}, "sources": {"speedup": "modelled"}}
    found = Run.from_json(old)
    assert (found["speedup"], found.get("memory_bytes")) == (1.5, None)
    assert found.sources == {"speedup": "modelled", "divergence": "measured"}
    assert found.intervals == {}


def test_every_metric_has_words_and_a_way_to_write_it() -> None:
    assert all(about.label and about.text(1.5) for about in METRICS.values())
    assert (METRICS["speedup"].text(1.314), METRICS["divergence"].text(0.0007)) == ("1.31x", "0.070 %")
