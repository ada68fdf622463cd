"""The benchmark of scripts that compile their model: what counts as a right claim, and who is timed."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.search import compiled
from benchmarks.search.by_hand import ADOPTED, AUTOCAST, BF16, FOLDER, WRITTEN
from benchmarks.search.compiled import Row, claims


@pytest.mark.parametrize(
    ("claimed", "apart", "overlap"),
    [
        ((1.50, 1.45, 1.55), 0.0, "yes"),
        ((1.60, 1.52, 1.68), 0.0667, "yes"),
        ((1.60, 1.58, 1.62), 0.0667, "no"),
        ((1.60, math.nan, math.nan), 0.0667, "-"),  # of trials: it may be wrong, and has no interval that is
    ],
)
def test_a_claim_is_right_where_intervals_overlap(
    claimed: tuple[float, float, float], apart: float, overlap: str
) -> None:
    row = Row("gpt6", ADOPTED, claimed, (1.5, 1.46, 1.54))
    assert row.apart == pytest.approx(apart, abs=1e-3)
    assert row.overlap == overlap


def test_claims_are_those_of_the_answer_and_of_what_is_done_by_hand() -> None:
    result: dict[str, Any] = {
        "best": {"name": "trial 3", "speedup": 2.0, "intervals": {"speedup": [1.9, 2.1]}},
        "presets": [
            {"name": "bf16 autocast", "speedup": 1.5, "intervals": {"speedup": [1.4, 1.6]}},
            {"name": "all int8", "speedup": 1.7},
            {"name": "all bf16", "speedup": 1.6},
        ],
    }
    times = {WRITTEN: [10.0] * 8, AUTOCAST: [7.0] * 8, BF16: [6.0] * 8, ADOPTED: [5.0] * 8}
    first, of_trials, answer = claims("gpt6", result, times)
    assert [(row.what, row.claimed) for row in (first, answer)] == [
        (AUTOCAST, (1.5, 1.4, 1.6)),
        (ADOPTED, (2.0, 1.9, 2.1)),
    ]
    assert (of_trials.what, of_trials.claimed[0], of_trials.overlap) == (BF16, 1.6, "-")
    assert [row.truth[0] for row in (first, of_trials, answer)] == pytest.approx([10 / 7, 10 / 6, 2.0])
    assert len(claims("gpt6", result, {who: ms for who, ms in times.items() if who != ADOPTED})) == 2
    result["presets"][0]["divergence"] = 0.0157  # the budget is 0.0025: it is not a choice
    assert [row.what for row in claims("gpt6", result, times)] == [BF16, ADOPTED]


def test_the_truth_is_that_of_processes_whose_model_is_compiled(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(compiled, "race", lambda *arguments: asked.append(arguments))
    policy = tmp_path / "policy.yaml"
    compiled.truth("conv", policy, 8)
    contenders = {WRITTEN: "script --compile", AUTOCAST: f"{AUTOCAST} --compile", BF16: "all bf16 --compile"}
    assert asked == [("conv", contenders | {ADOPTED: f"{policy} --compile"}, 8)]


def test_the_script_of_six_blocks_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    import gpt6  # type: ignore[import-not-found]

    monkeypatch.setattr(gpt6, "WIDTH", 24)
    monkeypatch.setattr(gpt6, "BLOCKS", 2)
    torch.manual_seed(0)
    task = gpt6.make()
    first = task.loss_of(task.model, task.batch())
    first.backward()
    task.optimizer.step()
    assert 4.0 < float(first.detach()) < 8.0
    assert "gpt6" in sys.modules
