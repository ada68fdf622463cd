import subprocess
import sys

import pytest

from autoprec.errors import UnknownNameError
from autoprec.policy import Policy, dump_yaml, parse_policy
from autoprec.policy.levels import LEVELS, level


@pytest.mark.parametrize("name", LEVELS)
def test_a_level_is_a_valid_policy_that_survives_a_file(name):
    policy = LEVELS[name].policy()
    assert parse_policy(dump_yaml(policy.to_dict())) == policy


@pytest.mark.parametrize(
    ("name", "communication", "weights", "gradients", "states"),
    [  # Azure/MS-AMP, docs/user-tutorial/optimization-level.md
        ("amp-fp16", "fp32", "fp32", "fp32", ("fp32", "fp32")),
        ("te", "fp32", "fp32", "fp32", ("fp32", "fp32")),
        ("msamp-o1", "fp8", "fp16_scaled", "e4m3_tensor", ("fp32", "fp32")),
        ("msamp-o2", "fp8", "fp16_scaled", "e4m3_tensor", ("e4m3_tensor", "fp16_tensor")),
        ("msamp-o3", "fp8", "e4m3_master", "e4m3_tensor", ("e4m3_tensor", "fp16_tensor")),
        ("msamp-o3-exact", "fp8", "e4m3_master", "e4m3", ("e4m3", "fp16_scaled")),
    ],
)
def test_rows_of_the_chart(name, communication, weights, gradients, states):
    state = level(name).optimizer
    assert level(name).communication.gradients == communication
    assert (state.weights, state.gradients) == (weights, gradients)
    assert (state.exp_avg, state.exp_avg_sq) == states


@pytest.mark.parametrize("name", LEVELS)
def test_the_sections_of_a_level_fit_a_policy_with_layers_of_its_own(name):
    mine = {"recipes": {"mine": {"format": "fp8"}, "half": {"format": "fp16"}}, "default": "mine"}
    mine["layers"] = [{"match": "head", "recipe": "half"}]
    both = Policy.model_validate({**mine, **level(name).fragment()})
    assert (both.optimizer, both.communication) == (level(name).optimizer, level(name).communication)
    assert [rule.recipe for rule in both.layers] == ["half"]


def test_unknown_level_names_the_nearest():
    with pytest.raises(UnknownNameError, match="msamp-o2"):
        level("msamp_o2")


def test_levels_need_no_torch():
    code = "import sys, autoprec.policy.levels; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
