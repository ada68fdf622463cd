from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from autoprec.errors import NothingAcceptableError, ScriptError
from autoprec.graph.report import GraphReport
from autoprec.trial.protocol import TrialResult
from autoprec.tuning.phases.record import answer_of, record_step, tunable
from autoprec.tuning.workers.local import HostPool
from tests.simulated import SimulatedRunner, SimulatedScript, simulated_graph


def record(script: SimulatedScript, folder: Path) -> GraphReport:
    with HostPool(lambda seed, _: SimulatedRunner(script, seed), folder) as pool:
        return record_step(pool.host().run, "train.py")


def test_one_step_is_recorded_with_its_layers(tmp_path: Path) -> None:
    assert record(SimulatedScript(), tmp_path) == simulated_graph()


def test_a_step_that_cannot_be_recorded_ends_the_search_with_its_cause(tmp_path: Path) -> None:
    with pytest.raises(ScriptError, match="could not be recorded: out of memory"):
        record(SimulatedScript(fail=lambda _policy: ("oom", "out of memory")), tmp_path)


@pytest.mark.parametrize(
    ("result", "text"),
    [
        (TrialResult("too_short", "the script ended"), "a smaller --warmup"),
        (TrialResult("crashed", "boom", tail="its own last line"), "its own last line"),
        (TrialResult("ok"), "run the script by itself first"),
    ],
)
def test_a_step_that_failed_says_why(result: TrialResult, text: str) -> None:
    with pytest.raises(ScriptError) as error:
        answer_of(result, GraphReport, "train.py", "recorded")
    assert text in str(error.value)
    assert "could not be recorded" in str(error.value)


def test_nothing_to_tune_is_an_answer_with_its_reason_and_its_own_exit_code() -> None:
    graph = simulated_graph()
    frozen = tuple(replace(layer, tunable=False, reason="its weight is frozen") for layer in graph.layers)
    for layers, why in ((frozen, "its weight is frozen"), ((), "no linear or conv layer ran")):
        with pytest.raises(NothingAcceptableError, match=why) as error:
            tunable(replace(graph, layers=layers), "train.py")
        assert error.value.exit_code == 3
    assert tunable(graph) is graph
