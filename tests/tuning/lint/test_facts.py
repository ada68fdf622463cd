"""What rules look at: the first rule that takes a layer, and where that is written."""

from __future__ import annotations

import pytest

from autoprec.precision.hardware import target
from autoprec.tuning.lint.facts import Facts
from tests.tuning.lint.test_rules import facts


def test_the_first_rule_takes_a_layer_and_its_line_is_known() -> None:
    here = facts("match: 'blocks.0.*', recipe: bf16", "match: '*', recipe: fp8_rowwise")
    assert here.rule_of("blocks.0.mlp.fc1") == 0
    assert here.rule_of("lm_head") == 1
    lines = [here.text.splitlines()[int(place.rpartition(":")[2]) - 1] for place in here.rule_places]
    assert ["blocks.0" in lines[0], "'*'" in lines[1]] == [True, True]
    assert here.place_of("lm_head") == here.rule_places[1]


def test_a_model_is_made_once_for_each_target_and_needs_a_step() -> None:
    here = facts("match: '*', recipe: bf16")
    assert here.model(target("h100")) is here.model(target("h100"))
    assert here.speedup(target("h100")) == pytest.approx(1.0)  # the configuration is in bf16 already
    with pytest.raises(ValueError, match="no recorded step"):
        Facts().model(target("h100"))
