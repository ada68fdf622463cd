from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from autoprec.errors import NothingAcceptableError
from autoprec.tuning.phases.record import record_step
from autoprec.tuning.workers.local import HostPool
from tests.simulated import SimulatedRunner, SimulatedScript, simulated_graph


def record(script: SimulatedScript, folder: Path) -> object:
    with HostPool(lambda seed, _: SimulatedRunner(script, seed), folder) as pool:
        return record_step(pool, "train.py")


def test_one_step_is_recorded_with_its_layers(tmp_path: Path) -> None:
    assert record(SimulatedScript(), tmp_path) == simulated_graph()


def test_a_step_that_cannot_be_recorded_ends_the_search_with_its_cause(tmp_path: Path) -> None:
    with pytest.raises(NothingAcceptableError, match="out of memory"):
        record(SimulatedScript(fail=lambda _policy: ("oom", "out of memory")), tmp_path)


def test_without_a_tunable_gemm_there_is_nothing_to_search(tmp_path: Path) -> None:
    graph = simulated_graph()
    frozen = tuple(replace(layer, tunable=False, reason="its weight is frozen") for layer in graph.layers)
    with pytest.raises(NothingAcceptableError, match="its weight is frozen"):
        record(SimulatedScript(graph=replace(graph, layers=frozen)), tmp_path)
