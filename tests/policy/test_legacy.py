"""Old recipe arguments: mapped, or refused with the reason."""

from __future__ import annotations

import enum

import pytest

from autoprec.errors import PolicyError, UnknownNameError
from autoprec.policy.legacy import LEGACY_ARGUMENTS, policy_from_recipe_arguments


def test_everything_that_means_something_is_mapped() -> None:
    policy, notes = policy_from_recipe_arguments(
        {
            "margin": 1,
            "interval": 1,
            "fp8_format": "HYBRID",
            "amax_history_len": 32,
            "amax_compute_algo": "max",
            "override_linear_precision": (False, False, True),
            "use_during_eval": True,
        },
        match="blocks.*",
    )
    recipe = policy.recipes["fp8_delayed"]
    assert recipe.scaling is not None
    assert (recipe.scaling.margin, recipe.scaling.amax_history_len, recipe.scaling.amax_compute_algo) == (1, 32, "max")
    assert recipe.describe() == "fp8 delayed e4m3/e4m3/e5m2"
    assert policy.layers[0].match == "blocks.*"
    assert policy.layers[0].gemms == {"wgrad": "bf16"}
    assert [note.split(":")[0] for note in notes] == ["interval=1", "use_during_eval"]


def test_defaults_are_those_of_accelerate() -> None:
    policy, notes = policy_from_recipe_arguments({})
    scaling = policy.recipes["fp8_delayed"].scaling
    assert scaling is not None
    assert (scaling.amax_history_len, scaling.amax_compute_algo, notes) == (1024, "most_recent", [])


def test_enumerations_are_read() -> None:
    policy, _ = policy_from_recipe_arguments({"fp8_format": enum.Enum("Format", "E4M3").E4M3})
    assert policy.recipes["fp8_delayed"].describe() == "fp8 delayed e4m3/e4m3/e4m3"


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"interval": 16}, "ignored it since 1.4"),
        ({"fp8_format": "E5M2"}, "do not exist"),
        ({"override_linear_precision": (True, False)}, "three booleans"),
        ({"override_linear_precision": "wgrad"}, "three booleans"),
        ({"amax_compute_algo": max}, "a function cannot be written"),
        ({"margin": 1.5}, "no integer"),
        ({"backend": "MSAMP", "opt_level": "O2"}, "level"),
        ({"opt_level": "O1"}, "only MS-AMP"),
        ({"margin": 99}, "margin"),
    ],
)
def test_what_no_policy_can_express_is_refused(arguments: dict, reason: str) -> None:
    with pytest.raises(PolicyError, match=reason):
        policy_from_recipe_arguments(arguments)


def test_unknown_arguments_are_named() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'amax_history_len'"):
        policy_from_recipe_arguments({"amax_history_length": 4})
    with pytest.raises(UnknownNameError, match="HYBRID"):
        policy_from_recipe_arguments({"fp8_format": "HYBRYD"})


def test_every_old_argument_has_a_documented_fate() -> None:
    assert set(LEGACY_ARGUMENTS) >= {
        "margin",
        "interval",
        "fp8_format",
        "amax_history_len",
        "amax_compute_algo",
        "override_linear_precision",
    }
