from __future__ import annotations

import pytest

from autoprec.policy.space import load_space
from autoprec.tuning.decide.presets import presets, widest
from autoprec.tuning.decide.problem import Problem, layer_key
from autoprec.tuning.sixteen_bit import by_hand
from tests.tuning.models import gpt


def compiled_script() -> Problem:
    return Problem.build(gpt(), load_space("hopper-fp8").executed(compiled=True, measured=True))


def test_what_people_run_today_is_there() -> None:
    problem = compiled_script()
    names = [name for name, _ in presets(problem)]
    for wanted in (
        "all bf16",
        "all fp8_rowwise",
        "all fp8_tensorwise, wgrad bf16",
        "fp8_rowwise, head in bf16",
        "fp8_rowwise, first and last block in bf16",
        "fp8_rowwise, attention in bf16",
        "fp8_rowwise, MLP only",
    ):
        assert wanted in names
    assert len(names) == len(set(names))


def test_the_cpu_gets_the_script_autocast_and_attention_in_fp32() -> None:
    found = dict(presets(Problem.build(gpt(), load_space("cpu"))))
    assert list(found)[:2] == ["script", "bf16 autocast"]
    assert found["bf16 autocast, norm and softmax fp32"]["norm"] == "fp32"
    assert found["bf16 autocast, attention fp32"]["attention"] == "fp32"


def test_a_recipe_that_the_head_lacks_is_not_said_to_be_everywhere() -> None:
    for space, name in (("cpu", "int8_tensor, wgrad bf16, head kept"), ("ada-fp8", "fp8_tensorwise, head in bf16")):
        names = [known for known, _ in presets(Problem.build(gpt(), load_space(space)))]
        recipe = name.rpartition(", head")[0]
        assert f"all {recipe}" not in names
        assert widest(recipe, names) == name


def test_no_two_presets_run_the_same() -> None:
    for name in ("hopper-fp8", "cpu", "msamp-levels", "te-delayed"):
        problem = Problem.build(gpt(), load_space(name))
        keys = [problem.key(params) for _, params in presets(problem)]
        assert len(keys) == len(set(keys))


def test_uniform_ones_come_first() -> None:
    problem = Problem.build(gpt(), load_space("hopper-fp8"))
    assert [name for name, _ in presets(problem)[:2]] == ["all bf16", "all fp8_rowwise"]


def test_exceptions_of_an_uncompiled_script_are_tried_compiled() -> None:
    found = dict(presets(Problem.build(gpt(), load_space("hopper-fp8").executed(compiled=False, measured=True))))
    assert found["all fp8_rowwise"]["execution"] == "keep"
    assert found["all fp8_rowwise, compiled"]["execution"] == "compile"
    assert found["fp8_rowwise, head in bf16, compiled"]["execution"] == "compile"
    assert "fp8_rowwise, head in bf16" not in found


def test_edge_blocks_and_head_are_left_out_where_the_name_says_so() -> None:
    problem = compiled_script()
    found = dict(presets(problem))
    kept = found["fp8_rowwise, first and last block in bf16"]
    assert {kept[layer_key(f"h.{b}.mlp.c_fc")] for b in (0, 3)} == {"bf16"}
    assert {kept[layer_key(f"h.{b}.mlp.c_fc")] for b in (1, 2)} == {"fp8_rowwise"}
    assert found["fp8_rowwise, head in bf16"]["layer:lm_head"] == "bf16"
    assert found["fp8_rowwise, attention in bf16"]["layer:h.1.attn.c_attn"] == "bf16"
    assert found["fp8_rowwise, MLP only"]["layer:h.1.mlp.c_proj"] == "fp8_rowwise"


def test_levels_of_the_space_are_presets() -> None:
    problem = Problem.build(gpt(), load_space("msamp-levels"))
    found = dict(presets(problem))
    assert found["O2"]["optimizer.exp_avg"] == "e4m3_tensor"
    assert found["O2-exact"]["optimizer.exp_avg"] == "e4m3"
    assert found["O1"]["communication.gradients"] == "fp8"


def test_what_the_head_alone_offers_is_called_a_head() -> None:
    found = dict(presets(Problem.build(gpt(), load_space("hopper-fp8"))))
    assert {"head bf16_fp32_output", "head tf32"} <= set(found)
    assert found["head tf32"]["layer:lm_head"] == "tf32"
    assert found["head tf32"]["layer:h.0.attn.c_attn"] == "bf16"


def test_apex_levels_are_presets_by_name() -> None:
    problem = Problem.build(gpt(), load_space("amp-fp16"))
    found = dict(presets(problem))
    assert {"O0", "O1/O2 (fp16 autocast)", "O3"} <= set(found)
    assert found["O0"]["activations"] == "keep"
    assert problem.policy(found["O0"]).loss_scaling == "none"
    assert problem.policy(found["O3"]).optimizer.weights == "fp16_scaled"


def test_a_preset_of_the_space_may_keep_the_last_blocks_and_the_head() -> None:
    problem = Problem.build(gpt(6), load_space("blackwell-nvfp4"))
    found = dict(presets(problem))

    def kept(name: str) -> set[str]:
        return {layer for layer, choice in problem.assignment(found[name]).items() if choice == "bf16"}

    def inside(*blocks: int) -> set[str]:
        return {name for name in problem.layer_names if any(f".{block}." in name for block in blocks)}

    assert kept("nvfp4, last 15% of the blocks and the head in bf16") == inside(5) | {"lm_head"}
    assert kept("nvfp4, last 4 blocks and the head in bf16") == inside(2, 3, 4, 5) | {"lm_head"}
    forward = problem.assignment(found["nvfp4, fprop in bf16, last 15% of the blocks and the head in bf16"])
    assert set(forward.values()) == {"bf16", "nvfp4/fprop=bf16"}


def test_a_head_with_fp32_sums_of_its_weight_gradient_is_a_preset() -> None:
    problem = Problem.build(gpt(3), load_space("blackwell-nvfp4"))
    found = dict(presets(problem))["head bf16, wgrad bf16_fp32_output"]
    plan = problem.policy(found).plan_of_rule(problem.policy(found).layers[0])
    assert found["layer:lm_head"] == "bf16/wgrad=bf16_fp32_output"
    assert (plan.fprop.output, plan.wgrad.output) == ("keep", "fp32")


def test_a_preset_that_would_keep_every_block_is_left_out() -> None:
    names = [name for name, _ in presets(Problem.build(gpt(3), load_space("blackwell-nvfp4")))]
    assert not any("last 4 blocks" in name for name in names)


@pytest.mark.parametrize("name", ["cpu", "hopper-fp8", "te-delayed"])
def test_every_preset_of_a_search_for_both_sides_is_a_policy_of_both(name: str) -> None:
    problem = Problem.build(gpt(), load_space(name).with_rollout())
    assert problem.parameters["rollout"] == ("same", "keep", "bf16", "fp16")
    found = dict(presets(problem))
    sides = {preset: problem.policy(params).rollout for preset, params in found.items()}
    assert sides["fp16 autocast"] is not None
    assert sides["fp16 autocast"].to_dict() == {"activations": "fp16", "weights": "fp16"}
    assert sides["bf16 autocast, rollout as written"] is None
    assert problem.policy(found["fp16 autocast"]).loss_scaling == "dynamic"
    assert all(side is not None for preset, side in sides.items() if preset.startswith("all "))
    assert sides.get("script") is None
    first = [preset for preset, _ in by_hand(list(found.items()))]
    plain = [preset for preset in ("bf16 autocast", "all bf16") if preset in found]
    wide = ["fp16 autocast, head output fp32"] if name != "cpu" else []
    assert first[: len(plain) + 2 + len(wide)] == [*plain, "fp16 autocast", *wide, "bf16 autocast, rollout as written"]
    for preset in wide:
        policy = problem.policy(found[preset])
        assert policy.rollout is not None
        assert policy.rollout.weights == policy.activations == "fp16"
        assert [rule.recipe for rule in policy.rollout.layers] == [rule.recipe for rule in policy.layers]
        assert "fp16_fp32_output" in [rule.recipe for rule in policy.rollout.layers]
