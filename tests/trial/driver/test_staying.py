"""Scans of one step are forks of a process that stays there."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from typing import Any

import pytest

from autoprec.trial.driver.runner import TrialRunner
from autoprec.trial.processes import marked_processes
from autoprec.trial.protocol import Probe, ScanSpec, TrainSpec
from tests.trial.conftest import uniform

FP8, HEAD = Probe("fp8", uniform("fp8")), Probe("head", uniform("bf16", "head"))
SPEC = ScanSpec(warmup=2, probes=(FP8,), stays=True)


def pid_of(runner: TrialRunner) -> int:
    """Return the process that stays; 0 where none does."""
    process = runner._staying._process
    return 0 if process is None else process.pid


def test_later_scans_of_a_step_are_forks_of_the_first(host: Any) -> None:
    with host("accumulation.py") as runner:
        plain = runner.run(replace(SPEC, probes=(FP8, HEAD), stays=False))
        assert not pid_of(runner)
        first, stays = runner.run(SPEC), pid_of(runner)
        told: list[int] = []
        second = runner.run(replace(SPEC, probes=(HEAD,), noise_batches=1, side_by_side=2), told.append)
        assert pid_of(runner) == stays
        trained = runner.run(TrainSpec(steps=2, warmup=0))  # a fork of the host, at its first step
        assert runner.run(replace(SPEC, warmup=3)).warmup == 3
        other = pid_of(runner)
        assert other != stays
        os.kill(other, signal.SIGKILL)
        time.sleep(0.1)
        again = runner.run(replace(SPEC, warmup=3))
        assert pid_of(runner) not in (0, other)
        mark = runner.mark
    assert (first.answer.probes, second.answer.probes) == (plain.answer.probes[:1], plain.answer.probes[1:])
    assert first.answer.gradient_noise == plain.answer.gradient_noise
    assert second.answer.gradient_noise is None
    assert (first.warmup, second.warmup, again.warmup) == (2, 0, 3)
    assert 0 <= second.start_s < first.training_s
    assert len(trained.losses) == 2
    assert not marked_processes(mark)


@pytest.mark.parametrize(("change", "status"), [({"warmup": 10_000}, "too_short"), ({"policy": {"x": 1}}, "mismatch")])
def test_one_that_ends_on_its_way_has_answered(change: dict[str, Any], status: str, host: Any) -> None:
    with host("accumulation.py") as runner:
        assert runner.run(replace(SPEC, **change)).status == status
        assert not pid_of(runner)
        assert runner.run(SPEC).ok


def test_where_a_process_must_not_be_forked_nothing_stays(host: Any) -> None:
    with host("accumulation.py", launch="process") as runner:
        assert runner.run(replace(SPEC, warmup=1)).ok
        assert not pid_of(runner)
