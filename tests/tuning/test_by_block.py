"""Runs of a script that compiles its model: by block where that pays, and read as if they had not been."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from autoprec.trial.protocol import TrainSpec, TrialResult
from autoprec.tuning.by_block import ByBlock, is_whole
from autoprec.tuning.decide.metrics import Reference
from autoprec.tuning.study.run import BY_BLOCK

LAYERS = tuple(f"h.{k}.mlp" for k in range(12))
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
    layers: tuple[str, ...] = LAYERS,
    compiled: bool = True,
    measured: bool = True,
    is_cpu: bool = False,
    allowed: bool = True,
) -> ByBlock:
    host, target = SimpleNamespace(compiled=compiled, layers=layers), SimpleNamespace(is_cpu=is_cpu)
    setup: Any = SimpleNamespace(host=host, target=target, measured=measured)
    ledger: Any = SimpleNamespace(timings={}, notes=[])
    ledger.note = ledger.notes.append
    return ByBlock(setup, ledger, script, allowed=allowed)


def begun(runs: ByBlock, script: Script) -> ByBlock:
    """Return it as it is after the reference was measured."""
    whole = script(REFERENCE, 0)
    blocks = runs.begin(REFERENCE, whole)
    if blocks is not None:
        pair = [Reference(r.losses, r.step_ms[0], r.memory_bytes, 1) for r in (whole, blocks)]
        runs.calibrate(pair[0], pair[1], 12)
    return runs


def test_times_and_memory_are_those_of_the_whole_model() -> None:
    script = Script()
    runs = begun(made(script), script)
    assert runs.active
    for seed, spec in ((0, TRIAL), (1, TRIAL)):
        result = runs.run(spec, seed)
        assert result.step_ms == pytest.approx((7.5,) * 6)
        assert result.memory_bytes == 100
    assert script.asked == [(0, False, False), (0, False, True), (0, True, True), (1, True, True)]
    (note,) = runs._ledger.notes
    assert "for 60 s" in note
    assert "one of its 12 blocks" in note
    assert "losses 0.990% from" in note
    assert "multiplied by 0.833" in note


@pytest.mark.parametrize(
    ("changes", "script"),
    [
        ({"layers": ("h.0.mlp", "h.1.mlp")}, Script()),
        ({"is_cpu": True}, Script(compile_s=9.0)),
        ({}, Script(compile_s=1.5)),
        ({}, Script(blocks=1)),
        ({"allowed": False}, Script()),
    ],
    ids=[
        "two blocks",
        "a CPU, compiled in seconds",
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
    assert len(runs._ledger.notes) == tried
    assert not tried or "no block could be compiled by itself" in runs._ledger.notes[0]


@pytest.mark.parametrize("measured", [True, False])
def test_where_policies_quantise_blocks_pay_sooner_and_modelled_times_are_not_told(measured: bool) -> None:
    script = Script(compile_s=3.0)
    runs = begun(made(script, measured=measured), script)
    assert runs.active
    assert ("times" in runs._ledger.notes[0]) is measured


def test_what_fails_by_block_under_the_scripts_own_seed_is_run_as_the_script_compiles_it() -> None:
    script = Script(oom=True)
    runs = begun(made(script), script)
    result = runs.run(TRIAL, 0)
    assert result.step_ms == pytest.approx((7.5,) * 6)
    assert not result.blocks
    assert script.asked[2:] == [(0, True, True), (0, True, False)]
    assert runs.run(TRIAL, 1).status == "oom"


def test_times_of_a_run_that_compiled_no_blocks_are_its_own() -> None:
    script = Script()
    runs = begun(made(script), script)
    script.blocks = 1  # its policy compiles nothing
    assert runs.run(TRIAL, 0).step_ms == pytest.approx((7.5,) * 6)


def test_a_record_says_how_it_was_compiled() -> None:
    record: Any = SimpleNamespace(tags=("preset",))
    assert is_whole(record)
    record.tags = ("preset", BY_BLOCK)
    assert not is_whole(record)
