"""The base class of what answers trials: its defaults, and what a runner has to bring."""

import pytest

from autoprec.trial.driver.base import Runner
from autoprec.trial.protocol import HostInfo, TrainSpec, TrialResult, TrialSpec


class OneAtATime(Runner):
    """The least that a runner is."""

    def start(self) -> HostInfo:
        raise AssertionError("not asked for here")

    def run(self, spec: TrialSpec) -> TrialResult:
        return TrialResult(status="ok", reason=f"{spec.total} steps")

    def close(self) -> None:
        pass


def test_a_runner_runs_one_trial_at_a_time_unless_it_says_otherwise() -> None:
    assert OneAtATime().size == 1
    assert OneAtATime().run(TrainSpec(steps=3, warmup=0)).reason == "3 steps"


@pytest.mark.parametrize("missing", ["start", "run", "close"])
def test_a_runner_without_one_of_its_parts_cannot_be_made(missing: str) -> None:
    parts = {name: getattr(OneAtATime, name) for name in ("start", "run", "close") if name != missing}
    with pytest.raises(TypeError, match=missing):
        type("Partial", (Runner,), parts)()
