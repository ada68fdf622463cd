from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from autoprec.errors import NothingAcceptableError, ScriptError
from autoprec.trial.command import ScriptCommand
from autoprec.trial.protocol import TrialResult, TrialSpec
from autoprec.tuning.engine import Search
from autoprec.tuning.events import Listeners
from tests.simulated import SimulatedRunner
from tests.tuning.test_engine import here, options, script, search  # noqa: F401


def searching(result: dict[str, object]) -> Search:
    class Other(SimulatedRunner):
        def run(self, spec: TrialSpec) -> TrialResult:
            ran = super().run(spec)
            return replace(ran, **result) if spec.kind == "train" else ran  # type: ignore[arg-type]

    asked, simulated = options(), script()
    command = ScriptCommand.parse(asked.command)
    return Search(asked, command, Listeners(), lambda seed, _folder: Other(simulated, seed))


@pytest.mark.parametrize(
    ("result", "error", "says"),
    [
        ({"status": "too_short", "losses": (1.0,) * 6}, NothingAcceptableError, "after 6 of 11 training steps"),
        ({"status": "diverged", "reason": "loss is nan"}, NothingAcceptableError, "own loss is not finite"),
        ({"status": "crashed", "reason": "KeyError: 'x'"}, ScriptError, "failed while training as written"),
    ],
)
@pytest.mark.usefixtures("here")
def test_a_reference_that_cannot_be_run_ends_the_search_with_the_cause(
    result: dict[str, object], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        searching(result).run()


def test_the_noise_floor_is_what_one_rounding_of_the_weights_does(here: Path) -> None:  # noqa: F811
    made, _ = search(script(), options(trials=2, seeds=1, finalists=1))
    kinds = {record.kind: record for record in made.records}
    assert kinds["reference"].metrics["divergence"] == 0.0
    assert made.ledger is not None
    assert made.ledger.reference.noise_floor == kinds["noise"].metrics["divergence"] > 0.0
    assert made.ledger.reference.deterministic
