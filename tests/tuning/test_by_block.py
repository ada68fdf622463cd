"""Runs of a script that compiles its model: by block where that pays, and read as if they had not been."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from autoprec.policy import load_policy
from autoprec.trial.protocol import DuelRounds, DuelSpec, TrainSpec, TrialResult
from autoprec.tuning.by_block import ByBlock, is_whole
from autoprec.tuning.decide.metrics import Reference
from autoprec.tuning.sixteen_bit import NAMES
from autoprec.tuning.state import Seconds
from autoprec.tuning.study.run import BY_BLOCK, DUEL, MOST_NOISE
from autoprec.tuning.timing.in_turns import STEPS_APART
from tests.simulated import SimulatedRunner, SimulatedScript, simulated_graph
from tests.tuning.test_engine import H100, here, options, search  # noqa: F401

REFERENCE, TRIAL = TrainSpec(), TrainSpec(policy={"default": "bf16"}, by_block=True)


class Script:
    """Answers trials: the whole model takes 10 ms a step, by block 12 ms and 50 bytes more; FP8 saves a quarter."""

    def __init__(self, *, oom: bool = False, blocks: int = 12, compile_s: float = 60.0) -> None:
        self.asked: list[tuple[int, bool, bool]] = []
        self.oom, self.blocks, self.compile_s = oom, blocks, compile_s

    def __call__(self, spec: TrainSpec, seed: int) -> TrialResult:
        self.asked.append((seed, spec.policy is not None, spec.by_block))
        by_block = spec.by_block and self.blocks > 1
        if self.oom and by_block and spec.policy is not None:
            return TrialResult("oom", blocks=self.blocks)
        step = (12.0 if by_block else 10.0) * (0.75 if spec.policy is not None else 1.0)
        return TrialResult(
            "ok",
            losses=(2.0, 1.0 if by_block else 1.01),
            step_ms=(step,) * 6,
            warmup=1,
            memory_bytes=150 if by_block else 100,
            training_s=self.compile_s + 6 * step / 1e3,
            blocks=self.blocks if by_block else 0,
        )


def made(
    script: Script,
    *,
    alike: int = 12,
    compiled: bool = True,
    measured: bool = True,
    is_cpu: bool = False,
    allowed: bool = True,
) -> ByBlock:
    host, target = SimpleNamespace(compiled=compiled, blocks=alike), SimpleNamespace(is_cpu=is_cpu)
    setup: Any = SimpleNamespace(host=host, target=target, measured=measured)
    state: Any = SimpleNamespace(seconds=Seconds(), notes=[])
    state.note = state.notes.append
    return ByBlock(setup, state, allowed=allowed)


def run(runs: ByBlock, script: Script, spec: TrainSpec, seed: int) -> TrialResult:
    """Run a trial as :meth:`PairedRunner.measure` does."""
    result = script(spec, seed)
    instead = runs.instead(spec, result, seed)
    return runs.read(spec, result) if instead is None else run(runs, script, instead, seed)


def begun(runs: ByBlock, script: Script) -> ByBlock:
    """Return it as it is after the reference was measured."""
    whole = script(REFERENCE, 0)
    if not runs.pays(whole):
        return runs
    blocks = script(replace(REFERENCE, by_block=True), 0)
    if runs.begin(blocks):
        pair = [Reference(r.losses, r.step_ms[0], r.memory_bytes, 1) for r in (whole, blocks)]
        runs.calibrate(pair[0], pair[1], 12)
    return runs


def test_times_and_memory_are_those_of_the_whole_model() -> None:
    script = Script()
    runs = begun(made(script), script)
    assert runs.active
    for seed, spec in ((0, TRIAL), (1, TRIAL)):
        result = run(runs, script, spec, seed)
        assert result.step_ms == pytest.approx((7.5,) * 6)
        assert result.memory_bytes == 100
    assert script.asked == [(0, False, False), (0, False, True), (0, True, True), (1, True, True)]
    (note,) = runs._state.notes
    assert "for 60 s" in note
    assert "one of its 12 blocks" in note
    assert "losses 0.990% from" in note
    assert "multiplied by 0.833" in note


@pytest.mark.parametrize(
    ("changes", "script"),
    [
        ({"alike": 2}, Script()),
        ({}, Script(compile_s=1.5)),
        ({}, Script(blocks=1)),
        ({"allowed": False}, Script()),
    ],
    ids=[
        "two blocks",
        "compiled at once",
        "a function that the script compiles",
        "verify",
    ],
)
def test_where_it_does_not_pay_or_cannot_be_runs_compile_as_the_script_does(
    changes: dict[str, Any], script: Script
) -> None:
    runs = begun(made(script, **changes), script)
    assert not runs.active
    tried = script.blocks == 1
    assert len(runs._state.notes) == tried
    assert not tried or "several blocks of one class" in runs._state.notes[0]


@pytest.mark.parametrize(
    ("result", "says", "never"),
    [
        (TrialResult("out_of_time", "1 of 23 steps were done"), "not enough time left to try", "failed"),
        (TrialResult("out_of_time", "a step takes 2 s"), "(a step takes 2 s)", "does not work"),
        (TrialResult("crashed", "KeyError: 'x'"), "was tried, and failed (KeyError: 'x')", "time left"),
        (TrialResult("oom"), "failed (oom)", "time left"),
        (TrialResult("ok", blocks=0), "Sequential with several blocks of one class", "failed"),
    ],
)
def test_why_runs_compile_the_whole_model_is_the_true_reason(result: TrialResult, says: str, never: str) -> None:
    runs = made(Script())
    assert not runs.begin(result)
    assert says in runs._state.notes[0]
    assert never not in runs._state.notes[0]


@pytest.mark.parametrize("measured", [True, False])
@pytest.mark.parametrize("is_cpu", [True, False])
def test_what_torchs_cache_may_hold_of_the_script_pays_by_block(is_cpu: bool, measured: bool) -> None:
    script = Script(compile_s=3.0)
    runs = begun(made(script, measured=measured, is_cpu=is_cpu), script)
    assert runs.active
    assert ("times" in runs._state.notes[0]) is measured


def test_what_the_first_step_compiled_tells_how_long_a_policy_compiles_that_torchs_cache_does_not_hold() -> None:
    """A GPT was said to compile for 4 s, which its trials did for 20: the reference found its graphs in the cache."""
    script = Script(compile_s=4.0)
    for first_step_s, compile_s, cached_s in (
        (40.0, 39.0, 4.0),
        (0.5, 4.0, 0.8),
    ):  # once it ran for its variants before
        runs = made(script)
        runs._state.seconds.first_step_s = first_step_s
        assert begun(runs, script).active
        seconds = runs._state.seconds
        assert (seconds.compile_s, seconds.cached_compile_s) == (pytest.approx(compile_s), pytest.approx(cached_s))
        assert seconds.cached_share == pytest.approx(cached_s / compile_s)
        assert f"for {compile_s:.0f} s" in runs._state.notes[0]


def test_what_fails_by_block_under_the_scripts_own_seed_is_run_as_the_script_compiles_it() -> None:
    script = Script(oom=True)
    runs = begun(made(script), script)
    result = run(runs, script, TRIAL, 0)
    assert result.step_ms == pytest.approx((7.5,) * 6)
    assert not result.blocks
    assert script.asked[2:] == [(0, True, True), (0, True, False)]
    assert run(runs, script, TRIAL, 1).status == "oom"


def test_times_of_a_run_that_compiled_no_blocks_are_its_own() -> None:
    script = Script()
    runs = begun(made(script), script)
    script.blocks = 1  # its policy compiles nothing
    assert run(runs, script, TRIAL, 0).step_ms == pytest.approx((7.5,) * 6)


def test_a_record_says_how_it_was_compiled() -> None:
    record: Any = SimpleNamespace(tags=("preset",))
    assert is_whole(record)
    record.tags = ("preset", BY_BLOCK)
    assert not is_whole(record)


def compiled_script(**changes: Any) -> SimulatedScript:
    """A script of four blocks that compiles its model for a minute."""
    graph = simulated_graph(4, width=4096, tokens=16384)
    return SimulatedScript(graph=graph, device=H100, compile_s=60.0, **changes)


def whole_runs(simulated: SimulatedScript) -> list[tuple[int, bool]]:
    """(seed, whether under a policy) of the runs that compiled the whole model."""
    return [(s, c.policy is not None) for s, c in simulated.calls if c.kind == "train" and not c.by_block]


def test_only_what_is_adopted_and_what_it_is_told_against_are_compiled_as_the_script_compiles(
    here: Path,  # noqa: F811
) -> None:
    simulated = compiled_script()
    made, result = search(simulated, options(trials=8))
    assert result.verdict == "adopt"
    assert made.state is not None
    whole = [r for r in made.records if r.kind == "finalist" and BY_BLOCK not in r.tags]
    adopted = whole[-1]
    assert adopted.name == result.best["name"]
    assert {r.name for r in whole[:-1]} == {"all bf16"}  # what 16 bit would gain, told beside it
    assert whole_runs(simulated) == [(0, False), (0, True), (0, True)]  # the script as written, first of all
    written = made.state.whole
    assert adopted.reference_losses == written.losses != made.state.reference.losses
    assert adopted["speedup"] == pytest.approx(written.step_ms / adopted["step_time_ms"])
    assert result.best["speedup"] == adopted["speedup"]
    assert result.best["step_time_ms"] == pytest.approx(adopted["step_time_ms"])
    others = [r for r in made.records if r.kind in ("preset", "search", "finalist") and BY_BLOCK in r.tags]
    assert others
    # compared with what rounds as they do: the difference of 1e-4 to the whole model's losses is not theirs
    assert all(r.reference_losses != written.losses for r in others)
    assert {r.seed for r in others} == {0, 1}
    assert any("one of its 4 blocks" in note and "0.010%" in note for note in result.notes)
    # the spread of such trials over seeds says nothing of whole models: autocast was 2.4x by its block, and 2.0x
    assert result.timings["timing_noise"] == MOST_NOISE


def test_a_policy_that_gains_by_block_alone_is_not_adopted(here: Path) -> None:  # noqa: F811
    slow = compiled_script(whole_factor=lambda policy: 10.0 if "fp8" in repr(policy.get("recipes")) else 1.0)
    made, result = search(slow, options(trials=8))
    assert result.verdict == "adopt"
    assert "fp8" not in load_policy(here / result.policy).to_dict().get("recipes", {})
    tried = [r.name for r in made.records if r.kind == "finalist" and BY_BLOCK not in r.tags]
    assert len(tried) == len(set(tried))
    assert result.best["name"] in tried


def test_no_more_than_two_acceptable_policies_are_compiled_as_a_whole(here: Path) -> None:  # noqa: F811
    script_ = compiled_script(whole_factor=lambda _policy: 1.3)  # every estimate by block is too high
    made, result = search(script_, options(trials=8))
    assert result.verdict == "adopt"
    tried = {r.name for r in made.records if r.kind == "finalist" and BY_BLOCK not in r.tags}
    assert result.best["name"] in tried
    assert len(tried - {*NAMES}) <= 2


def test_without_time_for_it_nothing_is_adopted_by_the_times_of_blocks(here: Path) -> None:  # noqa: F811
    simulated = compiled_script()
    made, result = search(simulated, options(trials=8, budget_s=60.0))  # one compilation takes six times as long
    assert result.verdict == "undecided"
    assert "as the script compiles it" in result.cut_short
    assert "by the times of compiled blocks" in result.reason
    assert whole_runs(simulated) == [(0, False)]
    assert not (here / "policy.yaml").exists()
    assert made.state is not None


def duels_of(simulated: SimulatedScript) -> list[tuple[bool, set[str]]]:
    """(whether it compiled blocks, contenders) of each duel."""
    return [(c.by_block, {p.id for p in c.probes}) for _, c in simulated.calls if isinstance(c, DuelSpec)]


def test_duels_of_blocks_rank_and_one_of_whole_models_decides(here: Path) -> None:  # noqa: F811
    """The whole model gains a tenth less under FP8 than its blocks do, and every row that is told says so."""
    simulated = compiled_script(whole_factor=lambda policy: 1.1 if "fp8" in repr(policy.get("recipes")) else 1.0)
    made, result = search(simulated, options(trials=8))
    assert result.verdict == "adopt"
    ranked, whole = ([names for blocks, names in duels_of(simulated) if blocks is how] for how in (True, False))
    assert ranked
    assert result.best["name"] in set.union(*whole)
    assert "all bf16" in set.union(*whole), "the best by hand is in it"
    low, high = result.best["intervals"]["speedup"]
    assert low <= result.best["speedup"] <= high
    duel = next(run for run in reversed(made.records) if run.kind == DUEL and run.name == result.best["name"])
    assert BY_BLOCK not in duel.tags
    assert result.best["speedup"] == pytest.approx(duel["speedup"])
    assert "not timed beside" not in result.reason
    by_hand = next(row for row in result.presets if row["name"] == "all bf16")
    assert "speedup" in by_hand["intervals"]
    evidence = load_policy(here / result.policy).evidence
    assert {"speedup_low", "speedup_high"} <= evidence.keys()


@pytest.mark.parametrize(
    "crashed",
    [TrialResult("crashed", "RuntimeError: no space left"), TrialResult("ok", answer=DuelRounds(steps=20))],
    ids=["fails", "too short"],
)
@pytest.mark.parametrize("whole_runs", [True, False])
def test_where_no_duel_of_whole_models_can_be_run_whole_runs_decide_or_nothing_is_adopted(
    here: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    crashed: TrialResult,
    whole_runs: bool,
) -> None:
    real, train = SimulatedRunner._duel, SimulatedRunner._train

    def trained(runner: SimulatedRunner, spec: TrainSpec, *, in_duel: bool = False) -> TrialResult:
        short = spec.steps == STEPS_APART and not in_duel and not whole_runs
        return TrialResult("crashed", "no") if short else train(runner, spec, in_duel=in_duel)

    monkeypatch.setattr(SimulatedRunner, "_train", trained)
    monkeypatch.setattr(SimulatedRunner, "_duel", lambda runner, spec: real(runner, spec) if spec.by_block else crashed)
    _, result = search(compiled_script(), options(trials=8))
    assert result.verdict == ("adopt" if whole_runs else "undecided")
    assert ("speedup" in result.best.get("intervals", {})) is whole_runs
    told = "a duel had 0 rounds, and an interval takes 6" if crashed.ok else "a duel failed: crashed: RuntimeError"
    assert any(told in note for note in result.notes)
