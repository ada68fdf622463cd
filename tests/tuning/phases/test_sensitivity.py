from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from autoprec.errors import NothingAcceptableError
from autoprec.policy import load_policy
from autoprec.trial.command import ScriptCommand
from autoprec.trial.protocol import GradientErrors, ProbeResult, ScanSpec, TrainSpec, TrialResult, TrialSpec
from autoprec.tuning.engine import Search
from autoprec.tuning.events import Listeners
from tests.simulated import SimulatedRunner
from tests.tuning.test_engine import Searched, here, mine, options, plain_search, script, search  # noqa: F401


def test_a_time_budget_cuts_the_scan_and_the_answer_says_so(here: Path) -> None:  # noqa: F811
    slow = script(probe_s=10.0)
    made, result = search(slow, options(study="mine", trials=4, seeds=1, budget_s=300.0))
    specs = [spec for _, spec in slow.calls if spec.kind == "sensitivity" and len(spec.probes) > 1]
    assert [spec.within_s for spec in specs] == [pytest.approx(60.0, abs=3.0)]
    assert "the time budget of 300 s ended the gradient errors" in result.cut_short
    assert result.resume
    assert made.state is not None
    assert np.isfinite(made.state.table.error2).any()  # type: ignore[union-attr]


def test_without_a_time_budget_every_question_is_asked() -> None:
    simulated, _, result, _ = plain_search()
    assert {spec.within_s for _, spec in simulated.calls if isinstance(spec, (TrainSpec, ScanSpec))} == {None}
    assert result.cut_short == ""


def test_the_gradient_noise_is_measured_once() -> None:
    simulated, made, _, _ = plain_search()
    asked = [spec.noise_batches for _, spec in simulated.calls if isinstance(spec, ScanSpec)]
    assert asked == [4] + [1] * (len(asked) - 1)
    assert len(asked) > 1
    assert made.state is not None
    assert made.state.gradient_noise == 0.5


def test_a_resumed_search_reads_its_table_and_measures_a_damaged_one_again(mine: Searched) -> None:  # noqa: F811
    again, asked_more = script(), options(study="mine", max_memory=10**12, resume=True)
    search(again, asked_more)
    asked = [spec for _, spec in again.calls if spec.kind == "sensitivity"]
    assert {len(spec.probes) for spec in asked} == {1}  # the errors of whole policies alone
    (mine.made.study_dir / "sensitivity.json").write_text('{"groups": []}')
    third = script()
    made, _ = search(third, replace(asked_more, max_memory=10**13))
    assert made.state is not None
    assert any("it is measured again" in note for note in made.state.notes)
    asked = [spec for _, spec in third.calls if spec.kind == "sensitivity"]
    assert {len(spec.probes) > 1 for spec in asked} == {True, False}


def test_where_every_change_fails_the_reason_is_that_of_the_first(here: Path) -> None:  # noqa: F811
    class Fails(SimulatedRunner):
        def run(self, spec: TrialSpec) -> TrialResult:
            result = super().run(spec)
            if spec.kind != "sensitivity":
                return result
            assert isinstance(result.answer, GradientErrors)
            rows = tuple(ProbeResult(row.id, failed="no such kernel") for row in result.answer.probes)
            return replace(result, answer=replace(result.answer, probes=rows))

    simulated, asked = script(), options()
    made = Search(asked, ScriptCommand.parse(asked.command), Listeners(), lambda seed, _folder: Fails(simulated, seed))
    with pytest.raises(NothingAcceptableError, match=r"no change of precision could be run.*no such kernel"):
        made.run()


def test_a_gradient_that_is_meant_to_be_smaller_is_no_error_and_costs_nothing(here: Path) -> None:  # noqa: F811
    """Trials run the shrunk embedding gradient that a space asks for; gradient errors are those of rounding alone."""
    (here / "shrunk.yaml").write_text(
        "schema: autoprec.space/1\nname: shrunk\nbaseline: bf16\nactivations: [bf16]\nembedding_gradient: [0.1]\n"
        "choices: [{match: '*', choices: [bf16, fp8_rowwise]}]\n"
    )
    simulated = script()
    made, result = search(simulated, options(space="shrunk.yaml", trials=3))
    trained = [spec.policy for _, spec in simulated.calls if isinstance(spec, TrainSpec) and spec.policy]
    assert trained
    assert {document.get("embedding_gradient") for document in trained} == {0.1}
    probes = [probe.policy or {} for _, spec in simulated.calls if isinstance(spec, ScanSpec) for probe in spec.probes]
    assert {document.get("embedding_gradient", 1.0) for document in probes} == {1.0}
    assert load_policy(result.policy).embedding_gradient == 0.1
    assert made.setup is not None
    cost, plans = made.setup.cost, made.setup.problem.plans({})
    shrunk = made.setup.problem.policy({})
    plain = shrunk.model_copy(update={"embedding_gradient": 1.0})
    assert cost.under(shrunk, plans).time_ms == cost.under(plain, plans).time_ms
    assert cost.under(shrunk, plans).memory_bytes == cost.under(plain, plans).memory_bytes
