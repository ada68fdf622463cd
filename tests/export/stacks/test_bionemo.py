"""BioNeMo: a word for each block and the recipes beside them, both ways, and configurations that say too little."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from autoprec.errors import FileError, PolicyError, UnknownNameError
from autoprec.export import Request, export, exporter
from autoprec.export.importers import import_policy
from autoprec.policy import resolve
from tests.conformance.exporters import MODELS, POLICIES

LAYERS = tuple(f"model.layers.{i}.{leaf}" for i in range(4) for leaf in ("self_attention.proj", "layernorm_mlp.fc1"))
LAYERS = (*LAYERS, "lm_head")
TE = "transformer_engine.common.recipe."


def fp8(name: str, form: str = "HYBRID", **kwargs: Any) -> dict[str, Any]:
    return {"enabled": True, "fp8_recipe": TE + name, "fp8_format": form, "fp8_recipe_kwargs": kwargs}


def fp4(**kwargs: Any) -> dict[str, Any]:
    return {"enabled": True, "fp4_recipe": f"{TE}NVFP4BlockScaling", "fp4_format": "E2M1", "fp4_recipe_kwargs": kwargs}


def words(*listed: str | None) -> dict[str, Any]:
    return {"config_kwargs": {"layer_precision": list(listed)}}


@pytest.mark.parametrize(
    "config",
    [
        {"fp8_config": fp8("MXFP8BlockScaling", "E4M3"), **words(None, "fp8", "fp8", None)},
        {
            "fp8_config": fp8("Float8CurrentScaling"),
            "fp4_config": fp4(disable_rht=True),
            **words("fp8", "fp4", "fp4", None),
        },
        {"fp8_config": fp8("Float8BlockScaling", "E4M3"), **words("fp8", "fp8", "fp8", "fp8")},
        {
            "fp8_config": fp8("DelayedScaling", amax_history_len=32, margin=1, amax_compute_algo="max"),
            **words(*["fp8"] * 4),
        },
        {"fp4_config": fp4(), **words(None, "fp4", "fp4", None)},
    ],
)
def test_it_comes_back_as_it_went_out_and_nothing_is_lost(config: dict[str, Any]) -> None:
    first = import_policy(config, layers=LAYERS).policy
    done = exporter("bionemo").export(Request(first, LAYERS))
    document = yaml.safe_load(done.files["bionemo_precision.yaml"])
    assert [loss for loss in done.losses if loss.match] == []
    assert {key: document[key] for key in config} == config
    assert import_policy(document, layers=LAYERS).policy == first


def test_blocks_that_are_counted_from_one_are_the_same_blocks() -> None:
    both = {"fp8_config": fp8("MXFP8BlockScaling", "E4M3"), "fp4_config": fp4()}
    listed = resolve(import_policy({**both, **words("fp4", "fp8", "fp8", "fp8")}).policy, LAYERS)
    assert resolve(import_policy({**both, "fp4_layers": [1]}).policy, LAYERS) == listed
    assert resolve(import_policy({**both, "fp8_layers": [2, 3, 4], "fp4_layers": [1]}).policy, LAYERS) == listed
    assert listed["lm_head"].keeps


def test_a_block_has_one_precision_and_the_rest_is_lost() -> None:
    policy = POLICIES["microscaling"]  # mxfp8, wo int8
    done = exporter("bionemo").export(Request(policy, MODELS["moe"]))
    assert [(loss.match, loss.instead.split(":")[0]) for loss in done.losses if loss.match] == [
        ("*wo", "BioNeMo's fp8 recipe")
    ]
    unnamed = export(policy, "bionemo", allow_lossy=True)
    assert all("pass --layers" in loss.instead for loss in unnamed.losses if loss.match)
    assert "config_kwargs" not in yaml.safe_load(unnamed.files["bionemo_precision.yaml"])


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (words("fp8", None), "blocks are fp8, and nothing says by which recipe"),
        ({"fp8_config": fp8("MXFP8BlockScaling"), **words(*["fp8"] * 32)}, "about 32 blocks, and the model has 4"),
        ({"fp8_config": fp8("MXFP8BlockScaling"), **words("fp6")}, "layer_precision is"),
        (
            {"fp8_config": fp8("MXFP8BlockScaling"), "fp4_config": fp4(), "fp8_layers": [1], "fp4_layers": [1]},
            "block 1 is in",
        ),
        ({"fp8_config": fp8("MXFP8BlockScaling"), "fp4_config": fp4()}, "nothing says which blocks run which"),
        ({"fp8_config": fp8("MXFP8BlockScaling"), "fp8_layers": [0]}, "has 0"),
        ({"fp8_config": fp8("Float8CurrentScaling", "E5M2"), **words("fp8")}, "E5M2 is not trainable"),
        ({"fp8_config": fp8("DelayedScaling", fp8_dpa=True), **words("fp8")}, "cannot be read as a policy: fp8_dpa"),
    ],
)
def test_what_says_too_little_or_too_much_is_refused(bad: dict[str, Any], says: str) -> None:
    with pytest.raises(FileError, match=says):
        import_policy(bad, layers=LAYERS)


def test_a_recipe_that_does_not_exist_and_a_value_that_it_does_not_take() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'MXFP8BlockScaling'"):
        import_policy({"fp8_config": fp8("MXFP8Scaling"), **words("fp8")})
    with pytest.raises(PolicyError, match="fp8_config"):
        import_policy({"fp8_config": fp8("DelayedScaling", margin=99), **words("fp8")})


def test_lists_of_a_format_that_is_off_are_named() -> None:
    done = import_policy({"fp8_config": fp8("MXFP8BlockScaling"), "fp4_layers": [1]})
    assert "fp4_layers" in done.notes[0]
