from __future__ import annotations

from pathlib import Path

import pytest

from autoprec.tuning.phases.finalists import LEAST_NOISE, MOST_NOISE, pick_finalists, pick_safer, timing_noise
from tests.tuning.test_engine import here, options, script, search  # noqa: F401


def test_timing_noise_is_twice_the_standard_error_within_bounds() -> None:
    assert timing_noise(False, [[1.0, 2.0]]) == 0.0
    assert timing_noise(True, [[1.0]]) == MOST_NOISE  # one seed says nothing about the spread
    assert timing_noise(True, [[1.5, 1.5, 1.5]]) == LEAST_NOISE
    assert timing_noise(True, [[0.95, 1.05]]) == pytest.approx(0.1)
    assert timing_noise(True, [[0.99, 1.01]]) == pytest.approx(0.02)


def test_finalists_are_the_best_and_the_best_preset_and_safer_ones_are_new(here: Path) -> None:  # noqa: F811
    made, _ = search(script(), options(trials=14))
    setup, ledger = made.setup, made.ledger
    assert setup is not None
    assert ledger is not None
    assert ledger.table is not None
    picked = pick_finalists(setup, ledger, ledger.table)
    fit = [r for r in ledger.acceptable_ones() if not setup.problem.is_script(r.params)]
    assert picked[0] == fit[0]
    assert next(r for r in fit if r.kind == "preset") in picked
    assert len(picked) <= setup.options.finalists + 1
    assert not any(setup.problem.is_script(record.params) for record in picked)
    safer = pick_safer(setup, ledger, ledger.table, picked, 0.35)
    assert safer
    assert not {record.number for record in safer} & {record.number for record in picked}
    assert pick_safer(setup, ledger, ledger.table, ledger.store.learned(), 0.35) == []


def test_gaps_beyond_the_budget_are_held_against_all_only_beside_benign_ones_of_the_same_seeds(
    here: Path,  # noqa: F811
) -> None:
    """A GAN: calm in the short trials of the first seed, chaotic in the finals; every policy would be rejected."""
    chaotic = script(error_scale=0.25, noise=lambda _seed, spec: 1.0 if spec.anneal else 0.0)
    _, result = search(chaotic, options(trials=4, seeds=2, finalists=1))
    assert result.verdict == "adopt"
    assert "the loss cannot judge it" in result.reason
    benign = [(seed, spec.anneal) for seed, spec in chaotic.calls if spec.perturb]
    assert benign.count((0, True)) == benign.count((1, True)) == 1
