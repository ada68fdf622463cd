"""Published policies on models: which layers get what, and what found no layer is said."""

import functools
from dataclasses import replace

import pytest

from autoprec.errors import PolicyMismatchError, UnknownNameError
from autoprec.export.stacks.torchao import NAMED
from autoprec.graph.report import GemmCall, GraphReport, Layer
from autoprec.policy import resolve
from autoprec.policy.library import published_names
from autoprec.policy.space import load_space
from autoprec.tuning.decide.presets import presets
from autoprec.tuning.decide.problem import Problem
from autoprec.tuning.decide.published import MOST_PRESETS, published_presets, resolve_published
from autoprec.tuning.sixteen_bit import by_hand
from benchmarks.cost.decoder import DecoderConfig, decoder_report
from tests.levels import LEVELS


@functools.cache
def decoder(blocks: int) -> GraphReport:
    return decoder_report(DecoderConfig(256, blocks, 4, 512, 1024), batch=1, seq=64)


def model(*names: str, kept: dict[str, str] | None = None) -> GraphReport:
    """A recorded step of linear layers with these names; ``kept`` ones are not tunable, for a reason."""
    kept = kept or {}
    layers = []
    for name in (*names, *kept):
        flags = ("router",) if "router" in name else ()
        gemm = (GemmCall("fprop", 8, 64, 64),)
        layers.append(
            Layer(name, "Linear", "linear", "", name, gemm, 4096, name not in kept, kept.get(name, ""), flags)
        )
    info = {"class": "Model", "parameters": 1, "fingerprint": ""}
    return GraphReport(info, tuple(layers), (), {}, 0, 0.0)


def blocks_in(choices: dict[str, str], choice: str) -> set[int]:
    return {int(name.split(".")[2]) for name, found in choices.items() if found == choice and ".layers." in name}


@pytest.mark.parametrize("name", published_names())
def test_every_policy_applies_to_a_decoder_of_100_blocks_and_its_globs_say_what_its_rules_do(name: str) -> None:
    report = decoder(100)
    found = resolve_published(f"published:{name}", report)
    names = [layer.name for layer in report.tunable]
    plans = [resolve(stage, names) for stage in found.policy.stages]
    recipes = found.policy.recipes
    for layer, choice in found.choices.items():
        recipe, *others = choice.split("/")
        asked = {"fprop": recipe, "dgrad": recipe, "wgrad": recipe} | dict(part.split("=") for part in others)
        for gemm, wanted in asked.items():
            ran = plans[0][layer].recipe(gemm)  # type: ignore[arg-type]
            assert ran == (
                None if wanted == "keep" else recipes[wanted].backward() if gemm != "fprop" else recipes[wanted]
            )
    assert found.policy.evidence["published"] == name


def test_the_first_and_last_blocks() -> None:
    found = resolve_published("published:nvfp4-12b", decoder(62))
    assert blocks_in(dict(found.choices), "bf16") == {0, 1, *range(54, 62)}
    assert found.choices["lm_head"] == "keep"
    assert not any("published for" in note for note in found.notes)


def test_a_share_of_the_blocks_is_rounded_up() -> None:
    found = resolve_published("published:torchtitan-nvfp4-8b", decoder(32))
    assert blocks_in(dict(found.choices), "bf16") == set(range(27, 32))  # torchtitan quantises blocks 0-26


def test_the_tail_is_a_phase_in_which_the_forward_alone_is_high() -> None:
    policy = resolve_published("published:nvfp4-12b-tail", decoder(62)).policy
    late = resolve(policy.stages[1], [layer.name for layer in decoder(62).tunable])
    plan = late["model.layers.30.mlp.up_proj"]
    assert policy.phases[0].start == 0.82
    assert plan.fprop is not None
    assert plan.fprop.format == "bf16"
    assert plan.dgrad is not None
    assert plan.dgrad.format == "nvfp4"
    assert late["model.layers.61.mlp.up_proj"].labels == dict.fromkeys(("fprop", "dgrad", "wgrad"), "bf16")


def test_another_depth_is_said_and_scaled_where_asked() -> None:
    found = resolve_published("published:nvfp4-12b", decoder(12))
    told = [note for note in found.notes if "published for 62 blocks" in note]
    assert told == [
        "published for 62 blocks, and this model has 12, of which it keeps as many high; "
        "published:nvfp4-12b:scaled keeps the share"
    ]
    scaled = resolve_published("published:nvfp4-12b:scaled", decoder(12))
    assert blocks_in(dict(scaled.choices), "bf16") == {0, 10, 11}
    assert scaled.name == "published:nvfp4-12b:scaled"
    assert not any("published for" in note for note in scaled.notes)


def test_more_blocks_than_the_model_has_are_refused() -> None:
    with pytest.raises(PolicyMismatchError, match="keeps the first 2 blocks and the last 8 blocks high") as caught:
        resolve_published("published:nvfp4-12b", decoder(6))
    assert "published:nvfp4-12b:scaled" in caught.value.fix
    with pytest.raises(PolicyMismatchError, match="counts none"):
        resolve_published("published:deepseek-v3:scaled", decoder(6))


def test_roles_that_the_model_lacks_are_refused_where_nothing_else_is_lowered() -> None:
    with pytest.raises(PolicyMismatchError, match=r"no layer would run .*: it is about mlp\.in"):
        resolve_published("published:maxtext-nvfp4", model("h.0.attn.c_attn", "h.1.attn.c_attn"))


def test_an_unknown_name_is_an_error() -> None:
    with pytest.raises(UnknownNameError):
        resolve_published("published:deepseek-v9", decoder(2))


def test_what_finds_no_layer_is_said() -> None:
    names = [f"h.{block}.{leaf}" for block in range(3) for leaf in ("attn.c_attn", "attn.c_proj", "mlp.fc", "odd")]
    found = resolve_published("published:llama4-scout-mxfp8", model(*names, kept={"h.0.moe.router": "feeds a top-k"}))
    assert found.notes == (
        "head: no layer of this model has this role alone",
        "embedding: no layer of this model has this role alone",
        "router: h.0.moe.router runs as the script wrote it: feeds a top-k",
        "attention.k: no layer of this model has this role alone",
        "attention.v: no layer of this model has this role alone",
        "the names of 3 layers do not say a role, and no rule for a role takes them: h.{0-2}.odd",
    )
    assert found.choices["h.0.odd"] == "mxfp8"
    flat = resolve_published("published:megatron-fp8-current", model("fc1", "fc2"))
    assert "the first block: the layers of this model are in no numbered blocks" in flat.notes


def test_the_roles_of_a_hybrid_with_latent_experts() -> None:
    block = ("mixer.out_proj", "mixer.in_proj", "self_attn.q_proj", "mlp.fc1_latent_proj", "mlp.experts.0.up_proj")
    names = [f"model.layers.{number}.{leaf}" for number in range(20) for leaf in block]
    found = resolve_published("published:nemotron-3-super", model(*names, "mtp.0.fc", "lm_head"))
    first = {name.removeprefix("model.layers.0."): found.choices[name] for name in names[: len(block)]}
    assert first == {
        "mixer.out_proj": "mxfp8",
        "mixer.in_proj": "nvfp4",
        "self_attn.q_proj": "bf16",
        "mlp.fc1_latent_proj": "bf16",
        "mlp.experts.0.up_proj": "nvfp4",
    }
    assert found.choices["mtp.0.fc"] == "bf16"
    assert blocks_in(dict(found.choices), "nvfp4") == set(range(6))


@pytest.mark.parametrize("name", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_torchaos_recipes_are_those_of_its_exporter(name: str) -> None:
    policy = resolve_published(
        f"published:torchao-{name.replace('with_gw', 'gw').replace('_', '-')}", decoder(2)
    ).policy
    layer = "model.layers.0.mlp.up_proj"
    assert resolve(policy, [layer], strict=False)[layer] == NAMED.plans[name]


def test_a_level_is_the_level() -> None:
    found = resolve_published("published:msamp-o3", decoder(2))
    assert found.policy.optimizer == LEVELS["msamp-o3"].optimizer
    assert found.policy.communication.gradients == "fp8"
    assert found.policy.recipes == LEVELS["msamp-o3"].recipes
    assert set(found.choices.values()) == {"fp8_msamp"}


def named(report: GraphReport, model_class: str) -> GraphReport:
    return replace(report, model={**report.model, "class": model_class})


def test_a_search_measures_what_was_published_for_the_family_and_the_space_offers() -> None:
    report = named(decoder(12), "LlamaForCausalLM")
    problem = Problem.build(report, load_space("blackwell-nvfp4"))
    found = dict(published_presets(problem))
    assert 1 <= len(found) <= MOST_PRESETS
    for name, params in found.items():
        asked = resolve_published(name, report).choices
        ran = problem.assignment(params)
        assert all(ran[layer] == choice for layer, choice in asked.items() if choice not in ("keep", "bf16"))
        assert set(ran.values()) <= {"bf16", *asked.values()}
    assert set(found) & {name for name, _ in presets(problem)}
    assert [name for name, _ in by_hand(presets(problem)) if name.startswith("published:")]


def test_no_search_grows_where_the_family_or_the_target_has_none() -> None:
    llama = named(decoder(12), "LlamaForCausalLM")
    assert published_presets(Problem.build(named(decoder(12), "GPT"), load_space("blackwell-nvfp4"))) == []
    for space in ("cpu", "hopper-fp8", "ampere-bf16"):
        assert published_presets(Problem.build(llama, load_space(space))) == []
