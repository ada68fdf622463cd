from __future__ import annotations

import json

from autoprec.cost.estimate import StepEstimate


def test_an_estimate_is_plain_data_and_says_what_it_rests_on() -> None:
    found = StepEstimate(2.0, 1.5, 2.5, 10, {"gemm": 2.0})
    document = json.loads(json.dumps(found.to_json()))
    assert document["label"] == "modelled, uncalibrated"
    assert StepEstimate(**document) == found
