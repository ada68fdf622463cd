"""torchao's FqnToConfig: names and expressions in its order, its own reader, and what no policy says is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from autoprec.errors import FileError, UnknownNameError
from autoprec.export import Request, export, exporter
from autoprec.export.importers import import_policy
from autoprec.policy import Policy, resolve
from tests.conformance.exporters import MODELS, POLICIES

pytestmark = pytest.mark.filterwarnings("ignore")  # torchao's own, on being imported
LAYERS = MODELS["llama"]
ROWWISE = {"_type": "Float8TrainingOpConfig", "_version": 1, "_data": {"float8_linear_recipe": "rowwise"}}
TENSOR = {"_type": "Float8TrainingOpConfig", "_version": 1, "_data": {"float8_linear_recipe": "tensorwise"}}


def document(configs: dict[str, Any]) -> dict[str, Any]:
    return {"_type": "FqnToConfig", "_version": 1, "_data": {"fqn_to_config": configs}}


def written(policy: Policy, layers: tuple[str, ...] = LAYERS) -> dict[str, Any]:
    done = export(policy, "torchao-fqn", layers=layers, allow_lossy=True)
    return dict(json.loads(done.files["fqn_to_config.json"]))


MIXED = {
    "lm_head": None,
    r"re:model\.layers\..+\.o_proj": ROWWISE,
    "re:.*up_proj": {"_type": "MXFP8TrainingOpConfig", "_data": {"wgrad_with_hp": True}},
    "model.layers.3.self_attn.o_proj": {"_type": "NVFP4TrainingConfig", "_data": {}},
    "model.layers.4.mlp.up_proj.weight": {
        "_type": "Int8MixedPrecisionTrainingConfig",
        "_data": {"output": True, "grad_input": True, "grad_weight": False},
    },
}


def test_it_comes_back_as_it_went_out_and_nothing_is_lost() -> None:
    first = import_policy(document(MIXED), layers=LAYERS).policy
    done = exporter("torchao-fqn").export(Request(first, LAYERS))
    assert done.losses == ()
    again = import_policy(json.loads(done.files["fqn_to_config.json"]), layers=LAYERS).policy
    assert resolve(again, LAYERS) == resolve(first, LAYERS)
    ran = {name: plan.describe() for name, plan in resolve(first, LAYERS).items()}
    assert ran["lm_head"] == "keep"
    assert ran["model.layers.3.self_attn.o_proj"] == "nvfp4", "a name comes before an expression"
    assert ran["model.layers.4.mlp.up_proj"] == "fprop: int8, dgrad: int8, wgrad: keep"
    assert ran["model.layers.5.mlp.up_proj"] == "fprop: mxfp8, dgrad: mxfp8, wgrad: keep"
    assert ran["model.layers.5.self_attn.o_proj"].startswith("fprop: fp8 row e4m3/e4m3/e4m3 fast")


def test_expressions_are_globs_where_no_layers_are_known() -> None:
    named = {key: config for key, config in MIXED.items() if not key.endswith(".weight")}
    first = import_policy(document({**named, "_default": TENSOR})).policy
    assert [rule.match for rule in first.layers] == [
        "lm_head",
        "model.layers.3.self_attn.o_proj",
        "model.layers.?*.o_proj",
        "*up_proj",
        "*",
    ]
    done = exporter("torchao-fqn").export(Request(first))
    assert all("modules whose name the glob matches" in loss.instead for loss in done.losses)
    assert import_policy(json.loads(done.files["fqn_to_config.json"])).policy == first


def test_an_expression_that_is_not_a_glob_needs_the_layers() -> None:
    only = document({r"re:model\.layers\.(1|2)\.mlp\.up_proj": ROWWISE})
    with pytest.raises(FileError, match="is not a glob") as caught:
        import_policy(only)
    assert "--layers" in caught.value.fix
    plans = resolve(import_policy(only, layers=LAYERS).policy, LAYERS)
    assert {name for name, plan in plans.items() if plan.scaled} == {f"model.layers.{i}.mlp.up_proj" for i in (1, 2)}


def test_torchao_writes_what_is_read() -> None:
    core = pytest.importorskip("torchao.core.config")
    from collections import OrderedDict

    from torchao.prototype.moe_training.config import Float8TrainingOpConfig, MXFP8TrainingOpConfig
    from torchao.quantization import FqnToConfig, Int8WeightOnlyConfig

    own = FqnToConfig(OrderedDict({"re:.*o_proj": Float8TrainingOpConfig(), "re:.*up_proj": MXFP8TrainingOpConfig()}))
    done = import_policy(core.config_to_dict(own), layers=LAYERS)
    assert done.notes == ()
    back = resolve(import_policy(written(done.policy), layers=LAYERS).policy, LAYERS)
    assert back == resolve(done.policy, LAYERS)
    assert back["model.layers.0.mlp.up_proj"].describe() == "mxfp8"
    with pytest.raises(FileError, match="is for inference, not for training"):
        import_policy(core.config_to_dict(FqnToConfig(OrderedDict({"a": Int8WeightOnlyConfig()}))))


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ({**document({"a": ROWWISE}), "_version": 2}, "version 2 is not read"),
        (document({"a": {**ROWWISE, "_version": 2}}), "'a': Float8TrainingOpConfig of version 2 is not read"),
        (document({"a": {"_type": "Float8TrainingOpConfig", "_data": {"out_dtype": "float16"}}}), "out_dtype: float16"),
        (
            document({"a": {"_type": "Float8TrainingOpConfig", "_data": {"float8_linear_recipe": "rowwise", "x": 1}}}),
            "x: 1",
        ),
        (document({"re:(a+)+": ROWWISE}), "too often, to be safe"),
        (document({"re:(a": ROWWISE}), "is not a regular expression"),
        (document({"a": 3}), "neither a config nor null"),
        ({"_type": "FqnToConfig", "_data": {"fqn_to_config": []}}, "gives names a config"),
    ],
)
def test_what_cannot_be_read_is_said(bad: dict[str, Any], says: str) -> None:
    with pytest.raises(FileError, match=says.replace("(", r"\(")):
        import_policy(bad, layers=LAYERS)


def test_a_recipe_that_torchao_does_not_have_is_not_passed_over() -> None:
    config = {"_type": "Float8TrainingOpConfig", "_data": {"float8_linear_recipe": "rowise"}}
    with pytest.raises(UnknownNameError, match="rowwise"):
        import_policy(document({"a": config}))
    with pytest.raises(UnknownNameError, match="Float8TrainingOpConfig"):
        import_policy(document({"a": {"_type": "Float8TrainingOp", "_data": {}}}))


def test_how_a_product_is_run_is_left_out_with_a_note() -> None:
    config = {"_type": "MXFP8TrainingOpConfig", "_data": {"kernel_preference": {"_data": "EMULATED"}}}
    assert "kernel_preference" in import_policy(document({"a": config})).notes[0]


def test_raw_weights_are_left_out_and_lost() -> None:
    kinds = {"a": "linear", "b": "expert"}
    done = export(POLICIES["rowwise, fast fprop"], "torchao-fqn", layers=kinds, allow_lossy=True)
    configs = json.loads(done.files["fqn_to_config.json"])["_data"]["fqn_to_config"]
    assert configs["a"] is not None
    assert configs["b"] is None
    assert any("raw weights are not converted" in line for line in done.lossy)
