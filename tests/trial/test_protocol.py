"""What driver and trial tell each other survives JSON, unknown keys of a newer peer included."""

import json
import math
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from autoprec.trial.protocol import FAILURES, HostInfo, Probe, TrialResult, TrialSpec

NUMBERS = st.floats(allow_nan=False, allow_infinity=False, width=32)


@given(
    st.builds(
        TrialSpec,
        kind=st.sampled_from(["train", "record", "sensitivity", "run"]),
        policy=st.none() | st.just({"schema": "autoprec.policy/1"}),
        steps=st.integers(1, 100),
        seed=st.none() | st.integers(0, 10),
        reference_losses=st.lists(NUMBERS, max_size=3).map(tuple),
        probes=st.lists(st.builds(Probe, id=st.text(max_size=5), policy=st.just({})), max_size=2).map(tuple),
    )
)
def test_a_request_survives(spec: TrialSpec) -> None:
    assert TrialSpec.from_json(json.loads(json.dumps(spec.to_json()))) == spec


@given(st.lists(NUMBERS, max_size=4), st.sampled_from(["ok", "pruned", *FAILURES]), st.dictionaries(st.text(), NUMBERS))
def test_a_result_survives(losses: list[float], status: str, payload: dict[str, Any]) -> None:
    result = TrialResult(status, losses=tuple(losses), step_ms=tuple(losses), payload=payload)
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
    assert TrialSpec.from_json({"steps": 3, "invented": 1}) == TrialSpec(steps=3)
    assert TrialResult.from_json({"status": "ok", "invented": 1}) == TrialResult("ok")


def test_a_host_survives() -> None:
    info = HostInfo("fork", {"class": "GPT"}, ("a", "b"), ("AdamW",), "cpu", notes=("x",))
    assert HostInfo.from_json(json.loads(json.dumps(info.to_json()))) == info
