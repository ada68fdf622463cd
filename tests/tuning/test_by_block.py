"""Trials of a script that compiles its model: by block where that pays, and read as if they had not been."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from autoprec.trial.protocol import TrialResult, TrialSpec
from autoprec.tuning.by_block import ByBlock, compile_seconds

LAYERS = tuple(f"h.{k}.mlp" for k in range(12))


class Script:
    """Answers trials: the whole model takes 10 ms a step, by block 12 ms and 50 bytes more; FP8 saves a quarter."""

    def __init__(self, *, oom: bool = False, blocks: int = 12) -> None:
        self.asked: list[tuple[bool, bool]] = []
        self.oom, self.blocks = oom, blocks

    def __call__(self, spec: TrialSpec, seed: int) -> TrialResult:
        self.asked.append((spec.policy is not None, spec.by_block))
        by_block = spec.by_block and self.blocks > 1
        if self.oom and by_block and spec.policy is not None:
            return TrialResult("oom", payload={"by_block": self.blocks})
        step = (12.0 if by_block else 10.0) * (0.75 if spec.policy is not None else 1.0)
        payload: dict[str, Any] = {"by_block": self.blocks} if by_block else {}
        return TrialResult("ok", step_ms=(step,) * 6, warmup=1, memory_bytes=150 if by_block else 100, payload=payload)


def made(script: Script, *, layers: tuple[str, ...] = LAYERS, compile_s: float = 60.0, **host: bool) -> ByBlock:
    setup: Any = SimpleNamespace(
        host=SimpleNamespace(compiled=host.get("compiled", True), layers=layers),
        measured=host.get("measured", True),
        options=SimpleNamespace(steps=5, warmup=1),
        reference_policy=lambda: None,
    )
    reference = SimpleNamespace(step_ms=10.0, memory_bytes=100)
    ledger: Any = SimpleNamespace(
        timings={"longest_training_s": compile_s + 0.06}, references={0: reference}, reference=reference, notes=[]
    )
    ledger.note = ledger.notes.append
    assert compile_seconds(setup, ledger) == (pytest.approx(compile_s) if all(host.values()) else 0.0)
    return ByBlock(setup, ledger, script)


TRIAL = TrialSpec(policy={"default": "bf16"}, by_block=True)


def test_times_and_memory_are_those_of_the_whole_model() -> None:
    script = Script()
    runs = made(script)
    for _ in range(2):
        result = runs.run(TRIAL, 0)
        assert result.step_ms == pytest.approx((7.5,) * 6)
        assert result.memory_bytes == 100
    assert script.asked == [(False, True), (True, True), (True, True)]  # the script as written once, too
    (note,) = runs._ledger.notes
    assert "one of its 12 blocks" in note
    assert "multiplied by 0.833" in note


@pytest.mark.parametrize(
    ("changes", "blocks"),
    [({"layers": ("h.0.mlp", "h.1.mlp")}, 12), ({"compile_s": 3.0}, 12), ({}, 1)],
    ids=["two blocks", "compiled in seconds", "a function that the script compiles"],
)
def test_where_it_does_not_pay_or_cannot_be_trials_compile_as_the_script_does(
    changes: dict[str, Any], blocks: int
) -> None:
    script = Script(blocks=blocks)
    result = made(script, **changes).run(TRIAL, 0)
    assert result.step_ms == pytest.approx((7.5,) * 6)
    assert script.asked[-1] == (True, False)


@pytest.mark.parametrize("host", [{"compiled": False}, {"measured": False}])
def test_eager_scripts_and_modelled_times_need_no_such_reference(host: dict[str, bool]) -> None:
    script = Script()
    made(script, **host).run(TRIAL, 0)
    assert script.asked == [(True, True)]


def test_what_fails_by_block_is_run_as_the_script_compiles_it() -> None:
    script = Script(oom=True)
    assert made(script).run(TRIAL, 0).step_ms == pytest.approx((7.5,) * 6)
    assert script.asked == [(False, True), (True, True), (True, False)]
    assert replace(TRIAL, by_block=False) != TRIAL
