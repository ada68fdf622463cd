"""BioNeMo: a word for each block and the recipes beside them, both ways, and configurations that say too little."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
import yaml

from autoprec.errors import FileError, MissingDependencyError, PolicyError, UnknownNameError
from autoprec.export import Request, export, exporter
from autoprec.export.importers import import_policy
from autoprec.policy import resolve
from tests.conformance.exporters import MODELS, POLICIES, random_policy
from tests.export import bionemo, real
from tests.export.recipe_readers import read_bionemo

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
    listed = json.loads(done.files["bionemo_config.json"])
    assert [loss for loss in done.losses if loss.match] == []
    assert {key: document[key] for key in config if key != "config_kwargs"} | {"config_kwargs": listed} == config
    assert import_policy(document, layers=LAYERS).policy == import_policy(document | listed, layers=LAYERS).policy
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
    assert [*unnamed.files] == ["bionemo_precision.yaml"]


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
    with pytest.raises(UnknownNameError, match="unknown key 'fp8_scope'"):
        import_policy({"fp8_config": {**fp8("MXFP8BlockScaling"), "fp8_scope": "experts"}, **words("fp8")})
    with pytest.raises(PolicyError, match="fp8_config"):
        import_policy({"fp8_config": fp8("DelayedScaling", margin=99), **words("fp8")})


def test_blocks_of_a_format_that_is_off_are_not_those_of_the_other() -> None:
    done = import_policy({"fp8_config": fp8("MXFP8BlockScaling"), "fp4_layers": [1]}, layers=LAYERS)
    assert "fp4_layers" in done.notes[0]
    plans = resolve(done.policy, LAYERS)
    assert plans["model.layers.0.self_attention.proj"].keeps
    assert not plans["model.layers.1.self_attention.proj"].keeps


@pytest.mark.filterwarnings("ignore")  # transformers and Transformer Engine warn of their own
def test_bionemos_own_script_and_model_run_what_was_exported() -> None:
    """Runs where BIONEMO_FRAMEWORK names a checkout, and Hydra, transformers and transformer-engine are installed."""
    policies = {**POLICIES, **{f"random {seed}": random_policy(seed) for seed in range(40)}}
    four = {"fp8_config": fp8("MXFP8BlockScaling", "E4M3"), "fp4_config": fp4(disable_rht=True)}
    policies["both"] = import_policy({**four, **words("fp4", "fp8", None, "fp4")}).policy
    for name, policy in policies.items():
        request = Request(policy, bionemo.layer_names(), name)
        done = exporter("bionemo").export(request)
        try:
            assert real.load_bionemo(done, request) == read_bionemo(done, request), name
        except MissingDependencyError as error:
            pytest.skip(str(error))


def test_bionemos_own_reading_of_its_lists_of_blocks() -> None:
    """Runs where BIONEMO_FRAMEWORK names a checkout (and nvidia-dlfw-inspect is installed, which it imports)."""
    try:
        text = bionemo.source("esm2_native_te/quantization.py").read_text(encoding="utf-8")
    except MissingDependencyError as error:
        pytest.skip(str(error))
    theirs: dict[str, Any] = {}
    exec(text, theirs)
    draw, both = random.Random(0), {"fp8": fp8("MXFP8BlockScaling", "E4M3"), "fp4": fp4()}
    for _ in range(300):
        on = {word: draw.random() < 0.7 for word in both}
        listed = {word: draw.choice([None, sorted(draw.sample([1, 2, 3, 4], draw.randint(0, 3)))]) for word in both}
        document = {f"{word}_config": config | {"enabled": on[word]} for word, config in both.items()}
        document |= {f"{word}_layers": blocks for word, blocks in listed.items()}
        try:
            found = theirs["resolve_layer_precision"](4, *on.values(), *listed.values())
        except ValueError:
            with pytest.raises(FileError):
                import_policy(document, layers=LAYERS)
            continue
        plans = resolve(import_policy(document, layers=LAYERS).policy, LAYERS)
        formats = {"mxfp8": "fp8", "nvfp4": "fp4"}
        ours = [plans[f"model.layers.{block}.self_attention.proj"].scaled for block in range(4)]
        assert [formats[found[0].format] if found else None for found in ours] == found, document
