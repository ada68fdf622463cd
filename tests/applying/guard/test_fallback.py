"""Steps back from a policy: which layers and GEMMs each takes to bf16."""

from __future__ import annotations

from typing import Any

import pytest

from autoprec.applying.guard import FALLBACKS, fall_back
from autoprec.errors import UnknownNameError
from tests.applying.guard.helpers import LAYERS, formats_of, make_policy


@pytest.mark.parametrize(
    ("name", "fprop", "wgrad"),
    [
        ("wgrad_bf16", ["fp8"] * 3, ["bf16"] * 3),
        ("head_bf16", ["fp8", "fp8", "bf16"], ["fp8", "fp8", "bf16"]),
        ("ends_bf16", ["bf16", "fp8", "bf16"], ["bf16", "fp8", "bf16"]),
        ("all_bf16", ["bf16"] * 3, ["bf16"] * 3),
        ("script", ["keep"] * 3, ["keep"] * 3),
    ],
)
def test_fallbacks(name: str, fprop: list[str], wgrad: list[str]) -> None:
    following = fall_back(make_policy(), name, LAYERS)
    assert (formats_of(following, "fprop"), formats_of(following)) == (fprop, wgrad)
    assert following.to_dict()  # it can be written


def test_fallbacks_add_up() -> None:
    policy: Any = make_policy()
    for name in FALLBACKS:
        policy = fall_back(policy, name, LAYERS)
    assert policy.layers == ()
    with pytest.raises(UnknownNameError, match="head_bf16"):
        fall_back(make_policy(), "haed_bf16", LAYERS)


def test_the_default_recipe_falls_back_too() -> None:
    policy = make_policy().model_copy(update={"layers": (), "default": "fp8_tensorwise"})
    assert formats_of(fall_back(policy, "wgrad_bf16", LAYERS)) == ["bf16"] * 3
