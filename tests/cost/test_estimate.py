from __future__ import annotations

import json

import pytest

from autoprec.cost.estimate import StepEstimate, ratio_bounds


def test_an_estimate_is_plain_data_and_says_what_it_rests_on() -> None:
    found = StepEstimate(2.0, 1.5, 2.5, 10, {"gemm": 2.0})
    document = json.loads(json.dumps(found.to_json()))
    assert document["label"] == "modelled, uncalibrated"
    assert StepEstimate(**document) == found


def test_the_bounds_of_a_modelled_speedup_hold_it_and_widen_with_the_models_spread() -> None:
    assert StepEstimate(2.0, 1.8, 2.2, 10).spread == pytest.approx(0.1)
    assert ratio_bounds(1.4, 0.1) == pytest.approx((1.32, 1.49))
    assert ratio_bounds(0.8, 0.1) == pytest.approx((0.75, 0.84))
    assert ratio_bounds(1.4, 0.0) == pytest.approx((1.4, 1.4))
