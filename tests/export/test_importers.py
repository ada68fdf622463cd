"""Importers read what people have, and never carry along a setting that does nothing."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import yaml

from autoprec.errors import FileError, UnknownNameError
from autoprec.export import export
from autoprec.export.importers import detect, import_policy
from autoprec.policy import resolve
from tests.conformance.exporters import MODELS, POLICIES, gemm_label

TE = {"fp8_format": "HYBRID", "amax_history_len": 32, "amax_compute_algo": "max", "margin": 0}


def test_te_keys_become_delayed_scaling() -> None:
    done = import_policy(TE)
    plan = done.policy.plan_of_rule(None)
    assert plan.fprop is not None
    assert plan.fprop.scaling is not None
    assert plan.fprop.scaling.amax_history_len == 32
    assert gemm_label(plan.dgrad, "dgrad") == "fp8 tensor delayed e5m2*e4m3 margin 0, max of 32"
    assert done.notes == ()


def test_a_dead_interval_is_named() -> None:
    assert "interval 4" in import_policy({**TE, "interval": 4}).notes[0]


def test_override_linear_precision_is_translated() -> None:
    done = import_policy({**TE, "override_linear_precision": [False, False, True]})
    plan = resolve(done.policy, ["a"])["a"]
    assert plan.wgrad is not None
    assert plan.wgrad.format == "bf16"
    assert plan.fprop is not None
    assert plan.fprop.format == "fp8"
    assert "2.0" in done.notes[0]


@pytest.mark.parametrize(
    "bad",
    [
        {"override_linear_precision": [True, False, False]},
        {"override_linear_precision": "(false, false)"},
        {"fp8_format": "E5M2"},
        {"margin": 1.5},
        {"override_linear_precision": [0, 0, 1]},
    ],
)
def test_what_no_library_runs_is_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(FileError):
        import_policy({**TE, **bad})


@pytest.mark.parametrize("level", ["../../etc", "O3", 2, None])
def test_an_optimisation_level_that_accelerate_does_not_have_is_refused(level: object) -> None:
    with pytest.raises(FileError, match="opt_level"):
        import_policy({"fp8_config": {"backend": "MSAMP", "opt_level": level}})


def test_accelerate_backends() -> None:
    te = import_policy({"mixed_precision": "fp8", "fp8_config": {"backend": "TE", "fp8_format": "E4M3"}})
    recipe = te.policy.plan_of_rule(None).fprop
    assert recipe is not None
    assert recipe.scaling is not None
    assert (recipe.scaling.amax_history_len, recipe.scaling.amax_compute_algo) == (1024, "most_recent")
    assert "evaluates in bf16" in te.notes[0]
    ao = import_policy({"fp8_config": {"backend": "AO"}}, layers=["a", "b", "c"])
    assert [p.keeps for p in resolve(ao.policy, ["a", "b", "c"]).values()] == [True, False, True]
    msamp = import_policy({"fp8_config": {"backend": "MSAMP", "opt_level": "O2"}})
    assert msamp.policy.optimizer.exp_avg == "e4m3_tensor"
    assert import_policy({"mixed_precision": "bf16"}).policy.activations == "bf16"


def test_the_names_that_accelerates_wizard_writes_are_reported() -> None:
    done = import_policy({"fp8_config": {"backend": "TE", "amax_history_length": 16}})
    assert "ignored yours" in done.notes[0]


def test_rules_that_live_in_python_are_spoken_of() -> None:
    done = export(POLICIES["mixed"], "accelerate", layers=MODELS["gpt"])
    again = import_policy(yaml.safe_load(done.files["accelerate_config.yaml"]), layers=MODELS["gpt"])
    assert any("precision_accelerate.py" in note for note in again.notes)


def test_a_tuple_in_yaml_is_text_and_is_read() -> None:
    """``(false, false, false)``, as accelerate's examples have it, was answered with wgrad in bf16."""
    off = import_policy({**TE, "override_linear_precision": "(false, false, false)"}).policy
    assert off == import_policy(TE).policy
    assert import_policy({**TE, "override_linear_precision": "(False, False, True)"}).policy != off
    with pytest.raises(FileError) as caught:
        import_policy({**TE, "override_linear_precision": "no"})
    assert "true" not in str(caught.value.fix)


def test_accelerate_round_trip() -> None:
    done = export(POLICIES["delayed, fast fprop"], "accelerate", layers=["a", "b"])
    again = import_policy(yaml.safe_load(done.files["accelerate_config.yaml"]))
    assert again.policy.plan_of_rule(None) == POLICIES["delayed"].plan_of_rule(None)


@pytest.mark.parametrize("case", ["bf16", "tensorwise everywhere", "delayed"])
def test_megatron_round_trip(case: str) -> None:
    """Delayed scaling is in the flags, which layers inherit: it came back as no FP8 at all."""
    done = export(POLICIES[case], "megatron", layers=MODELS["gpt"], allow_lossy=True)
    flags = done.files["megatron_flags.txt"].split()
    again = import_policy(yaml.safe_load(done.files["te_precision_config.yaml"]), flags=flags)
    assert resolve(again.policy, MODELS["gpt"]) == resolve(POLICIES[case], MODELS["gpt"])


SUPER = """
configs:
  mxfp8:
    transformer_engine_config_type: TEQuantizationParams
    training_recipe: {fp8_quantization_recipe: mxfp8}
    evaluation_recipe: {}
  bf16: {transformer_engine_config_type: TEQuantizationParams, training_recipe: {}}
matchers:
  attn_qkv: {config: bf16, type: glob, pattern: "*.linear_qkv", enabled: true}
  off: {config: bf16, type: glob, pattern: "*.linear_fc1", enabled: false}
  mamba_out: {config: mxfp8, type: glob, pattern: "*mixer.out_proj", enabled: true}
"""
SUPER_LAYERS = [
    f"decoder.layers.{block}.{leaf}"
    for block in range(12)
    for leaf in ("self_attention.linear_qkv", "mixer.out_proj", "mlp.linear_fc1", "mlp.router")
] + ["output_layer"]
SUPER_FLAGS = "--bf16 --fp4-format e2m1 --first-last-layers-bf16 --num-layers-at-start-in-bf16 0"


def test_megatrons_file_means_what_its_flags_say() -> None:
    """FP4 and the last blocks in bf16 became `default: keep`, and the evaluation recipe was left out."""
    flags = f"{SUPER_FLAGS} --num-layers-at-end-in-bf16 2".split()
    done = import_policy(yaml.safe_load(SUPER), layers=SUPER_LAYERS, flags=flags)
    plans = resolve(done.policy, SUPER_LAYERS)
    ran = {name: plan.describe() for name, plan in plans.items()}
    assert {ran[f"decoder.layers.{block}.mlp.linear_fc1"] for block in range(10)} == {"nvfp4"}
    assert {ran[f"decoder.layers.{block}.mlp.linear_fc1"] for block in (10, 11)} == {"bf16"}
    assert ran["decoder.layers.0.mixer.out_proj"] == "mxfp8"
    assert ran["decoder.layers.11.mixer.out_proj"] == "bf16"  # a matcher does not quantise where autocast is off
    assert ran["decoder.layers.0.self_attention.linear_qkv"] == "bf16"
    assert ran["decoder.layers.0.mlp.router"] == ran["output_layer"] == "keep"
    assert done.policy.evidence["evaluation"] == {"mxfp8": {}}
    assert done.notes == ()
    counted = import_policy(yaml.safe_load(SUPER), flags=[*flags, "--num-layers", "12"])
    assert resolve(counted.policy, SUPER_LAYERS) == plans


def test_a_recipe_of_a_later_megatron_is_not_read_as_bf16() -> None:
    later = yaml.safe_load(SUPER)
    later["configs"]["mxfp8"]["training_recipe"] = {"fp6_quantization_recipe": "mxfp6"}
    with pytest.raises(UnknownNameError, match=r"later version.*unknown key 'fp6_quantization_recipe'") as raised:
        import_policy(later, layers=SUPER_LAYERS, flags=[*SUPER_FLAGS.split(), "--num-layers", "12"])
    assert "fp4_quantization_recipe" in str(raised.value.fix)


def test_megatrons_file_and_flags_round_trip() -> None:
    flags = f"{SUPER_FLAGS} --num-layers-at-end-in-bf16 2".split()
    first = import_policy(yaml.safe_load(SUPER), layers=SUPER_LAYERS, flags=flags).policy
    written = export(first, "megatron", layers=SUPER_LAYERS, allow_lossy=True)
    document = yaml.safe_load(written.files["te_precision_config.yaml"])
    again = import_policy(document, layers=SUPER_LAYERS, flags=written.files["megatron_flags.txt"].split()).policy
    for name, plan in resolve(first, SUPER_LAYERS).items():
        back = resolve(again, SUPER_LAYERS)[name]
        assert back == plan or (plan.keeps and back.describe() == "bf16")  # Megatron trains in bf16 as a whole
    assert [*again.evidence["evaluation"].values()] == [{}]


def test_the_last_blocks_of_an_unknown_number_are_refused() -> None:
    with pytest.raises(FileError, match="how many there are is not known") as caught:
        import_policy(yaml.safe_load(SUPER), flags=SUPER_FLAGS.split())
    assert "--num-layers" in caught.value.fix


def test_what_a_document_is_its_keys_say() -> None:
    assert detect(TE) == "te"
    with pytest.raises(FileError, match="not an accelerate"):
        detect({"foo": 1})


MEGATRON = {
    "configs": {
        "mx": {
            "transformer_engine_config_type": "TEQuantizationParams",
            "training_recipe": {"fp8_quantization_recipe": "mxfp8"},
        },
        "bf16": {"transformer_engine_config_type": "TEQuantizationParams", "training_recipe": {}},
    },
    "matchers": {
        "fc": {"type": "glob", "enabled": True, "pattern": "*.mlp.linear_fc*", "config": "mx"},
        "rest": {"type": "glob", "enabled": True, "pattern": "*.layers.*", "config": "bf16"},
    },
}
_TE = {"backend": "TE", "fp8_format": "HYBRID", "use_autocast_during_eval": True}
ACCELERATE = {"mixed_precision": "fp8", "fp8_config": _TE}
AO = {"mixed_precision": "fp8", "fp8_config": {"backend": "AO"}}
AUTOMODEL = {"fp8": {"enabled": True, "recipe_name": "rowwise"}, "model": {"torch_dtype": "float32"}}
FQN = {
    "_type": "FqnToConfig",
    "_version": 1,
    "_data": {"fqn_to_config": {"fc": {"_type": "NVFP4TrainingConfig", "_version": 1, "_data": {}}}},
}


def _with(document: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    made = copy.deepcopy(document)
    here = made
    *sections, key = path.split("/")
    for name in sections:
        here = here.setdefault(name, {})
    here[key] = value
    return made


@pytest.mark.parametrize(
    ("document", "path", "value", "told"),
    [
        (MEGATRON, "matchers/new", {"type": "glob"}, "matcher 'new' does not say 'enabled: true'"),
        (MEGATRON, "matchers/fc/patern", "*", "matchers.fc.patern (did you mean pattern?)"),
        (MEGATRON, "configs/mx/training_recipe/tp_only_amax_red", True, "configs.mx.training_recipe.tp_only_amax_red"),
        (MEGATRON, "configs/unused", {"training_recipe": {}}, "configs.unused"),
        (MEGATRON, "defaults", {"config": "mx"}, "not in the policy: defaults"),
        (ACCELERATE, "fp8_config/amax_histroy_len", 16, "fp8_config.amax_histroy_len (did you mean amax_history_len?)"),
        (ACCELERATE, "fp8_config/use_autocast_during_eval", False, "accelerate then evaluates in bf16"),
        (ACCELERATE, "fp8_config/use_mxfp8_block_scaling", True, "fp8_config.fp8_format"),
        (ACCELERATE, "num_processes", 8, "not in the policy: num_processes"),
        (ACCELERATE, "fp8_config/opt_level", "O2", "fp8_config.opt_level"),
        (AO, "fp8_config/pad_inner_dim", True, "pad_inner_dim"),
        (AO, "fp8_config/enable_fsdp_float8_all_gather", True, "weights are gathered as they are"),
        (AO, "fp8_config/recipe", "rowwise", "fp8_config.recipe"),
        ({"mixed_precision": "bf16"}, "fp8_config/backend", "TE", "not in the policy: fp8_config"),
        (AUTOMODEL, "fp8/enable_fsdp_float8_all_gather", True, "fp8.enable_fsdp_float8_all_gather"),
        (AUTOMODEL, "model/backend/attn", "te", "model.backend.attn"),
        (AUTOMODEL, "step_scheduler", {"max_steps": 5}, "step_scheduler"),
        (FQN, "_data/filter", "x", "_data.filter"),
        (TE, "use_autocast_during_eval", False, "accelerate then evaluates in bf16"),
        (TE, "use_mxfp8_block_scaling", True, "the policy: fp8_format, amax_history_len, amax_compute_algo"),
    ],
)
def test_what_no_reader_asks_for_is_named(document: dict[str, Any], path: str, value: Any, told: str) -> None:
    before, notes = import_policy(document).notes, import_policy(_with(document, path, value)).notes
    assert not any(told in note for note in before)
    assert any(told in note for note in notes), notes


@pytest.mark.parametrize("document", [MEGATRON, AUTOMODEL, FQN])
def test_rules_that_fit_no_layer_are_told(document: dict[str, Any]) -> None:
    assert any("nobody is told; pass --layers" in note for note in import_policy(document).notes)
    notes = import_policy(document, layers=["transformer.h.0.c_attn", "head"]).notes
    fits = document is AUTOMODEL  # it takes every linear layer
    assert any("no rule fits any of the 2 layers" in note for note in notes) != fits, notes
    named = ["decoder.layers.0.mlp.linear_fc1", "decoder.layers.0.mlp.linear_fc2", "fc"]
    notes = import_policy(document, layers=named).notes
    assert not any("no rule fits" in note or "pass --layers" in note for note in notes)
