import subprocess
import sys

import pytest

from autoprec.errors import UnknownNameError
from autoprec.policy import OptimizerPolicy, Policy, dump_yaml, parse_policy
from autoprec.policy.levels import LEVELS, bytes_per_weight, level


@pytest.mark.parametrize("name", LEVELS)
def test_a_level_is_a_valid_policy_that_survives_a_file(name):
    policy = LEVELS[name].policy()
    assert parse_policy(dump_yaml(policy.to_dict())) == policy


@pytest.mark.parametrize(
    ("name", "communication", "weight", "master", "gradient", "states"),
    [  # Azure/MS-AMP, docs/user-tutorial/optimization-level.md
        ("amp-fp16", "fp32", "fp32", "-", "fp32", "fp32+fp32"),
        ("te", "fp32", "fp32", "-", "fp32", "fp32+fp32"),
        ("msamp-o1", "fp8", "fp16 scaled", "-", "e4m3", "fp32+fp32"),
        ("msamp-o2", "fp8", "fp16 scaled", "-", "e4m3", "e4m3+fp16 scaled"),
        ("msamp-o3", "fp8", "e4m3", "fp16 scaled", "e4m3", "e4m3+fp16 scaled"),
    ],
)
def test_rows_of_the_chart(name, communication, weight, master, gradient, states):
    row = level(name).chart_row()
    found = [row[k] for k in ("communication", "weight", "master weight", "weight gradient", "optimizer states")]
    assert found == [communication, weight, master, gradient, states]


@pytest.mark.parametrize(
    ("name", "total"),
    [("amp-fp16", 16), ("te", 16), ("msamp-o1", 11), ("msamp-o2", 6), ("msamp-o3", 7), ("bf16-sr-fp8", 6)],
)
def test_bytes_per_weight(name, total):
    parts = bytes_per_weight(level(name).optimizer)
    assert parts["total"] == total
    assert sum(v for k, v in parts.items() if k != "total") == total


def test_every_storage_word_has_bytes():
    schema = OptimizerPolicy.model_json_schema()["properties"]
    for field, entry in schema.items():
        for word in entry["enum"]:
            assert bytes_per_weight(OptimizerPolicy(**{field: word}))["total"] > 0


@pytest.mark.parametrize("name", [name for name in LEVELS if name != "amp-fp16"])
def test_a_level_goes_onto_a_policy_and_leaves_its_layers(name):
    policy = Policy(
        recipes={"mine": {"format": "fp8"}, "bf16": {"format": "bf16"}},
        layers=({"match": "head", "recipe": "bf16"},),
        default="mine",
        activations="bf16",
    )
    both = level(name).onto(policy)
    assert (both.layers, both.recipes, both.default) == (policy.layers, policy.recipes, policy.default)
    assert both.optimizer == level(name).optimizer
    assert both.communication == level(name).communication


def test_unknown_level_names_the_nearest():
    with pytest.raises(UnknownNameError, match="msamp-o2"):
        level("msamp_o2")


def test_levels_need_no_torch():
    code = "import sys, autoprec.policy.levels; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
