from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from autoprec.errors import PolicyError
from autoprec.policy import GUARD_METRICS, Policy, load_policy
from autoprec.precision.hardware import target
from autoprec.precision.recipes import BUILTIN_RECIPES
from autoprec.reports.shares import share_words
from autoprec.tuning.decide.decision import Decision
from autoprec.tuning.decide.sentences import Reason, statements
from autoprec.tuning.events import Listeners
from autoprec.tuning.options import SearchOptions
from autoprec.tuning.phases.answer import (
    _device,
    _plain,
    _row,
    figures_of_evidence,
    guard_for,
    named_over,
    settled,
    with_size,
)
from autoprec.tuning.state import SearchState
from autoprec.tuning.study.run import DUEL, Run, metrics_of
from autoprec.tuning.study.study import StudyStore, default_storage
from tests.tuning.test_engine import Searched, here, mine, options, plain_search, script, search  # noqa: F401


def state(tmp_path: Path) -> SearchState:
    store = StudyStore(default_storage(tmp_path), "study", ("step_time_ms", "divergence"), resume=False)
    return SearchState(store, Listeners(), SearchOptions(("train.py",)), started=0.0)


def test_an_answer_that_was_not_cut_short_stands(tmp_path: Path) -> None:
    answer = Decision("stay", (Reason("none_measured"),))
    assert settled(answer, state(tmp_path)) is answer


def test_what_was_cut_short_says_so_and_never_stay(tmp_path: Path) -> None:
    books = state(tmp_path)
    for what in ("no time to time", "after 2 of 30 trials"):
        books.cut(what)
    stay = settled(Decision("stay", (Reason("none_measured"),)), books)
    assert (stay.verdict, [reason.code for reason in stay.reasons]) == ("undecided", ["none_measured", "cut_short"])
    assert [line[:9] for line in statements(stay.reasons)] == ["no policy", "cut short", "cut short"]
    figures = {"name": "p", "objective": "throughput", "speedup": 2.0, "divergence": 0.0, "budget": 0.0025, "tied": 1}
    adopted = Reason("adopted", figures | {"sixteen_bit": None, "caveat": None, "merit": 2.0})
    adopt = settled(Decision("adopt", (adopted,)), books)
    assert (adopt.verdict, [reason.code for reason in adopt.reasons]) == ("adopt", ["adopted", "cut_short"])
    assert adopt.reason.startswith("p is the fastest acceptable policy so far: 2.00x")
    assert adopt.reason.endswith("; cut short: no time to time; after 2 of 30 trials")


_GAIN = {"name": "p", "objective": "throughput", "speedup": 2.0, "divergence": 0.0, "budget": 0.0025, "tied": 1}
_GAIN |= {"sixteen_bit": None, "caveat": None, "merit": 2.0}


@pytest.mark.parametrize(
    ("reason", "says"),
    [
        (Reason("adopted", _GAIN), "policy: 2.00x over the fp32 reference"),
        (Reason("adopted", _GAIN | {"sixteen_bit": 1.5}), "1.33x over 16-bit (2.00x over the fp32 reference)"),
        (Reason("adopted", _GAIN | {"untimed": True}), "not timed beside the fp32 reference"),
        (Reason("no_gain", {"name": "p", "merit": 0.8, "noise": 0.02}), "not better than the fp32 reference: 0.80x"),
        (
            Reason("no_gain", {"name": "p", "merit": 1.1, "noise": 0.2, "slowest": 0.9}),
            "than the fp32 reference: 0.90x",
        ),
        (Reason("only_blocks", {"name": "p", "speedup": 2.0}), "2.00x over the fp32 reference by"),
    ],
)
def test_a_gain_over_another_reference_is_not_said_to_be_over_the_script(reason: Reason, says: str) -> None:
    stay = Decision("stay", (reason, Reason("none_measured")))
    assert named_over(stay, "script") is stay
    first, second = named_over(stay, "fp32").reasons
    assert says in str(first)
    assert "fp32" not in str(reason)
    assert "script" not in str(first)
    assert second == Reason("none_measured")


def test_a_policy_that_one_device_cannot_hold_says_so(here: Path) -> None:  # noqa: F811
    _, result = search(script(device="cpu"), options(trials=4, target="h100", cost_scale="width=8"))
    assert result.verdict == "adopt"
    assert result.best["memory_bytes"] > 80e9
    assert result.reason.count("It does not fit") == 1
    assert "(modelled, as this policy)" in result.reason
    _, result = search(script(device="cpu"), options(trials=4, target="h100", study="small"))
    assert "It does not fit" not in result.reason


def test_a_policy_that_does_not_fit_is_told_so_and_one_that_fits_is_not() -> None:
    def run(name: str, speedup: float, memory: float) -> Run:
        return Run(
            0, "search", name, {"a": 1}, {}, "ok", metrics=metrics_of({"speedup": speedup, "memory_bytes": memory})
        )

    large, fits = run("trial 3", 1.5, 90e9), run("trial 2", 1.2, 60e9)
    setup: Any = SimpleNamespace(measured=False, target=target("h100"))
    answer = Decision("adopt", (Reason("none_measured"),), run=large)
    found = with_size(answer, setup)
    assert found.reasons[-1].code == "does_not_fit"
    assert found.reason.endswith("cut the batch")
    assert with_size(replace(answer, run=fits), setup).reasons == answer.reasons


def test_a_gradient_error_whose_probes_failed_is_in_no_row_and_no_evidence() -> None:
    known, failed = (metrics_of({"speedup": 1.1, "gradient_error": error}) for error in (0.02, math.inf))
    rows = []
    for metrics in (known, failed):
        run = Run(0, "search", "all bf16", {}, {}, "ok", metrics=metrics)
        rows.append(_row(run, Decision("stay", ()), {}))
    assert (rows[0]["gradient_error"], rows[0]["gradient_error_source"]) == (0.02, "predicted")
    assert "gradient_error" not in rows[1]
    assert "gradient_error" not in figures_of_evidence(rows[1])
    json.dumps(rows, allow_nan=False)


def test_a_guard_watches_what_a_policy_can_do_wrong() -> None:
    fp8 = Policy(recipes={"fp8_rowwise": BUILTIN_RECIPES["fp8_rowwise"]}, default="fp8_rowwise")
    assert guard_for(fp8).metrics == tuple(GUARD_METRICS)
    assert guard_for(fp8).fallback[0] == "wgrad_bf16"
    bf16 = Policy(recipes={"bf16": BUILTIN_RECIPES["bf16"]}, default="bf16")
    assert guard_for(bf16).fallback == ("script",)


def test_figures_keep_four_digits() -> None:
    assert _plain(1.234567) == 1.235
    assert _plain(math.inf) == 0.0


def test_the_result_and_the_policy_tell_the_same_figures() -> None:
    _, made, result, folder = plain_search()
    evidence = load_policy(folder / result.policy).evidence
    for name in ("speedup", "speedup_over_16bit", "divergence", "gradient_error", "noise_floor"):
        assert evidence[name] == _plain(result.best[name])
    assert evidence["reason"] == result.reason
    assert made.state is not None
    assert made.state.measured_errors[result.best["name"]] == result.best["gradient_error"]
    told = [result.best, *result.presets, *result.front]
    known = {row["name"]: row for row in told}
    for row in told:  # over all its runs, everywhere
        gaps = [r["divergence"] for r in made.records if r.name == row["name"] and r.ok and r.kind != DUEL]
        assert (row["seeds"], row["divergence"]) == (len(gaps), pytest.approx(sum(gaps) / len(gaps)))
        for name in ("gradient_error", "speedup", "step_time_ms"):
            assert row[name] == pytest.approx(known[row["name"]][name])
    assert evidence["trials"] == result.trials["complete"] <= 17
    assert result.reference["name"] == "script as written"
    assert result.budget["max_divergence"] == made.options.max_divergence


def test_a_stay_after_trials_says_what_each_layer_would_have_added(here: Path) -> None:  # noqa: F811
    made, result = search(script(device="cpu"), options(target="h100", trials=4, seeds=2, max_gradient_error=1e-9))
    assert result.verdict == "stay", result.reason
    assert result.explanation["decisions"] == []  # nothing was decided
    why = result.explanation["layers"]
    assert made.setup is not None
    assert sum(row["count"] for row in why) == len(made.setup.graph.tunable)
    assert {row["choice"] for row in why} == {made.setup.problem.baseline}
    assert any("would be faster and add an error of" in row["text"] for row in why)
    assert "why" not in load_policy(here / result.policy).evidence


def test_layers_that_no_short_trial_can_judge_are_named_in_the_notes(here: Path) -> None:  # noqa: F811
    known, zeros = "head", "blocks.0.fc"  # the first stays in 16 bits
    _, result = search(script(hardly_moved=(known, zeros)), options(trials=6, seeds=2))
    assert any(f"{known} and 1 more: hardly any gradient" in note for note in result.notes)


def test_members_of_the_front_are_written_with_what_was_measured(mine: Searched, here: Path) -> None:  # noqa: F811
    made, result = mine.made, mine.result
    files = sorted((made.study_dir / "front").glob("*.yaml"))
    policies = [load_policy(file) for file in files]
    named = [row for row in result.front if any(r.name == row["name"] and r.policy for r in made.records)]
    assert len(policies) == len(named) > 0
    for policy, row in zip(policies, named, strict=True):
        assert policy.evidence["trial"] == row["name"]
        assert policy.evidence["speedup"] == pytest.approx(row["speedup"], rel=1e-3)
        runs = [r for r in made.records if r.name == row["name"] and r.kind != DUEL]
        assert policy.evidence["seeds"] == len(runs)
        gaps = [r["divergence"] for r in runs]
        assert policy.evidence["divergence"] == pytest.approx(sum(gaps) / len(gaps), rel=1e-3)
    for file in (*files, here / "policy.yaml", made.study_dir / "best.yaml"):
        text = file.read_text()
        assert text.startswith("# checksum sha256:")
        file.write_text(text[: len(text) // 2])
        with pytest.raises(PolicyError):
            load_policy(file)


@pytest.mark.parametrize(("target", "source"), [("auto", "fitted"), ("h100", "modelled")])
def test_an_answer_says_what_each_decision_did(target: str, source: str) -> None:
    _, made, result, _ = plain_search() if target == "auto" else plain_search(target=target)
    *rows, together = result.explanation["decisions"]
    assert {row["source"] for row in (*rows, together)} == {source}
    assert together["decision"] == "together"
    assert rows[0]["saved_ms"]["low"] <= rows[0]["saved_ms"]["value"] <= rows[0]["saved_ms"]["high"]
    assert sum(row["time_share"]["value"] for row in rows) == pytest.approx(1.0, abs=0.01)
    assert sum(row["divergence_share"]["value"] for row in rows) == pytest.approx(1.0, abs=0.01)
    # what was adopted saves about what the decisions are said to save, over everything at the baseline
    assert made.setup is not None
    plain = next(row for row in result.presets if row["name"] == "all bf16")
    saved = plain["step_time_ms"] - result.best["step_time_ms"]
    assert together["whole_ms"] == pytest.approx(saved, rel=1e-3)
    # where compiling is timed it gains more here than the cost model believes, and the report says so
    assert ("does not explain" in share_words(result.explanation["decisions"])) is (target == "auto")


@pytest.mark.parametrize(
    ("measured", "workers", "threads"), [(True, 0, "3 threads"), (True, 2, "1 thread"), (False, 0, "1 thread")]
)
def test_a_policy_says_in_how_many_threads_it_was_timed(
    measured: bool, workers: int, threads: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    setup = plain_search().made.setup
    assert setup is not None
    asked = replace(setup, measured=measured, options=replace(setup.options, workers=workers), target=target("cpu"))
    assert _device(replace(asked, host=replace(asked.host, device="cpu"))).endswith(f", {threads})")
