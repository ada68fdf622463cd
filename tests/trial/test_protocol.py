"""What driver and trial tell each other survives JSON, unknown keys of a newer peer included."""

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoprec.errors import UnknownNameError
from autoprec.graph.report import OperatorTime, OperatorTimes
from autoprec.trial.protocol import (
    FAILURES,
    Answer,
    DuelRounds,
    DuelSpec,
    GemmFindings,
    GradientErrors,
    HostInfo,
    LiftSpec,
    NumericsSpec,
    Probe,
    ProbeResult,
    RecordSpec,
    ScanSpec,
    TimesSpec,
    TrainSpec,
    TrialResult,
    TrialSpec,
    TrySpec,
)
from tests.simulated import simulated_graph

NUMBERS = st.floats(allow_nan=False, allow_infinity=False, width=32)
PROBES = st.lists(st.builds(Probe, id=st.text(max_size=5), policy=st.just({})), max_size=2).map(tuple)
TOLD: dict[str, Any] = {
    "policy": st.none() | st.just({"schema": "autoprec.policy/1"}),
    "backend": st.sampled_from(["auto", "emulated"]),
    "seed": st.none() | st.integers(0, 10),
}
LOSSES = st.lists(NUMBERS, max_size=3).map(tuple)
SPECS = st.one_of(
    st.builds(TrainSpec, steps=st.integers(1, 100), reference_losses=LOSSES, by_block=st.booleans(), **TOLD),
    st.builds(TrySpec, steps=st.integers(1, 100)),
    st.builds(RecordSpec, **TOLD),
    st.builds(ScanSpec, probes=PROBES, warmup=st.integers(0, 9), within_s=st.none() | NUMBERS, **TOLD),
    st.builds(DuelSpec, probes=PROBES, precision=NUMBERS, on_the_clock=st.booleans(), **TOLD),
    st.builds(NumericsSpec, steps=st.integers(1, 100), **TOLD),
    st.builds(LiftSpec, lines=st.integers(1, 100), **TOLD),
    st.builds(TimesSpec, steps=st.integers(1, 100), warmup=st.integers(1, 9), **TOLD),
)
ROWS = st.builds(ProbeResult, id=st.text(max_size=5), gradient_error=st.none() | NUMBERS, failed=st.text(max_size=5))
ANSWERS = st.one_of(
    st.none(),
    st.just(simulated_graph(1)),
    st.builds(
        GradientErrors,
        probes=st.lists(ROWS, max_size=3).map(tuple),
        gradient_noise=st.none() | NUMBERS,
        hardly_moved=st.lists(st.text(max_size=5), max_size=2).map(tuple),
        reference_loss=st.none() | NUMBERS,
    ),
    st.builds(
        DuelRounds,
        rounds=st.lists(st.dictionaries(st.text(max_size=3), NUMBERS), max_size=3).map(tuple),
        steps=st.integers(0, 9),
        refused=st.dictionaries(st.text(max_size=3), st.text(max_size=3)),
    ),
    st.just(OperatorTimes(3.0, 3.5, 5, (OperatorTime("aten::mm", "", 4.0, 2.5),))),
    st.builds(GemmFindings, ok=st.booleans(), gemms=st.just(({"layer": "h.0", "worst": 0.5},))),
)


@given(SPECS)
def test_a_request_survives_as_what_it_was(spec: TrialSpec) -> None:
    back = TrialSpec.from_json(json.loads(json.dumps(spec.to_json())))
    assert back == spec
    assert type(back) is type(spec)


@given(st.lists(NUMBERS, max_size=4), st.sampled_from(["ok", "pruned", *FAILURES]), ANSWERS)
def test_a_result_survives_with_its_answer(losses: list[float], status: str, answer: Answer | None) -> None:
    result = TrialResult(status, losses=tuple(losses), step_ms=tuple(losses), problems=("x",), answer=answer)
    assert TrialResult.from_json(json.loads(json.dumps(result.to_json(), allow_nan=False))) == result
    assert result.ok == (status == "ok")


def test_a_loss_that_is_no_number_is_null_in_json_and_no_number_again() -> None:
    result = TrialResult("diverged", losses=(1.0, math.nan, math.inf))
    text = json.dumps(result.to_json(), allow_nan=False)
    back = TrialResult.from_json(json.loads(text)).losses
    assert back[0] == 1.0
    assert math.isnan(back[1])
    assert math.isnan(back[2])


def test_keys_of_a_newer_peer_are_ignored() -> None:
    assert TrialSpec.from_json({"steps": 3, "invented": 1}) == TrainSpec(steps=3)
    assert TrialResult.from_json({"status": "ok", "invented": 1}) == TrialResult("ok")


def test_a_kind_that_there_is_not_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(UnknownNameError, match="sensitivity"):
        TrialSpec.from_json({"kind": "sensitivities"})


@pytest.mark.parametrize(
    ("spec", "steps"),
    [
        (TrainSpec(steps=20, warmup=3), 23),
        (TrySpec(steps=30), 30),
        (RecordSpec(), 0),
        (ScanSpec(warmup=5), 5),
        (DuelSpec(), 0),
        (NumericsSpec(steps=4), 4),
    ],
)
def test_each_kind_says_after_how_many_steps_it_ends_or_asks(spec: TrialSpec, steps: int) -> None:
    assert spec.total == steps


@pytest.mark.parametrize(
    ("row", "error"),
    [
        (ProbeResult("a", 0.25), 0.25),
        (ProbeResult("a", None), math.inf),
        (ProbeResult("a", 0.25, nonfinite=True), math.inf),
        (ProbeResult("a", failed="no such kernel"), math.inf),
    ],
)
def test_a_probe_without_finite_gradients_has_an_infinite_error(row: ProbeResult, error: float) -> None:
    assert row.error == error


def test_a_host_survives() -> None:
    info = HostInfo("fork", {"class": "GPT"}, ("a", "b"), ("AdamW",), "cpu", notes=("x",))
    assert HostInfo.from_json(json.loads(json.dumps(info.to_json()))) == info
