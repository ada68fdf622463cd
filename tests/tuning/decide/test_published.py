"""Published policies on models: which layers get what, and what found no layer is said."""

import functools
import itertools
from dataclasses import replace

import pytest
import torch

from autoprec.errors import PolicyMismatchError, UnknownNameError
from autoprec.export.stacks.torchao import NAMED
from autoprec.graph.report import GemmCall, GraphReport, Layer
from autoprec.policy import LayerPlan, resolve
from autoprec.policy.library import published, published_names
from autoprec.policy.space import load_space
from autoprec.precision.recipes import BUILTIN_RECIPES, GEMMS, Gemm, Recipe
from autoprec.tuning.decide.presets import presets
from autoprec.tuning.decide.problem import Problem
from autoprec.tuning.decide.published import MOST_PRESETS, library_presets, published_presets, resolve_published
from autoprec.tuning.sixteen_bit import by_hand
from benchmarks.cost.decoder import DecoderConfig, decoder_report
from tests.levels import LEVELS

UP, ROWLESS = "model.layers.0.mlp.up_proj", "no scales by row here"


@functools.cache
def decoder(blocks: int, width: int = 256) -> GraphReport:
    return decoder_report(DecoderConfig(width, blocks, 4, 2 * width, 1024), batch=1, seq=64)


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


def as_run(recipe: Recipe, gemm: Gemm) -> Recipe:
    return recipe.of_gemm(gemm) if gemm == "fprop" else recipe.of_gemm(gemm).backward()


def blocks_in(choices: dict[str, str], choice: str) -> set[int]:
    return {int(name.split(".")[2]) for name, found in choices.items() if found == choice and ".layers." in name}


@pytest.mark.parametrize("name", published_names())
def test_every_policy_applies_to_a_decoder_of_100_blocks_and_its_globs_say_what_its_rules_do(name: str) -> None:
    report = decoder(100, 4096)
    found = resolve_published(f"published:{name}", report)
    names = [layer.name for layer in report.tunable]
    plans = [resolve(stage, names) for stage in found.policy.stages]
    recipes = found.policy.recipes
    for layer, choice in found.choices.items():
        recipe, *others = choice.split("/")
        asked = {"fprop": recipe, "dgrad": recipe, "wgrad": recipe} | dict(part.split("=") for part in others)
        for gemm, wanted in asked.items():
            ran = plans[0][layer].recipe(gemm)  # type: ignore[arg-type]
            assert ran == (None if wanted == "keep" else as_run(recipes[wanted], gemm))
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
    published_name = f"published:torchao-{name.replace('with_gw', 'gw').replace('_', '-')}"
    policy = resolve_published(published_name, decoder(2, 4096)).policy
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
    assert 1 <= len([name for name in found if published(name).families]) <= MOST_PRESETS
    for name, params in found.items():
        asked = resolve_published(name, report).choices
        ran = problem.assignment(params)
        assert all(ran[layer] == choice for layer, choice in asked.items() if choice not in ("keep", "bf16"))
        assert set(ran.values()) <= {"bf16", *asked.values()}
    assert set(found) & {name for name, _ in presets(problem)}
    assert [name for name, _ in by_hand(presets(problem)) if name.startswith("published:")]


def test_no_search_grows_where_the_family_or_the_target_has_none() -> None:
    llama = named(decoder(12), "LlamaForCausalLM")
    nvfp4 = Problem.build(named(decoder(12), "GPT"), load_space("blackwell-nvfp4"))
    assert [name for name, _ in published_presets(nvfp4)] == ["published:te-mxfp8"]
    for space in ("cpu", "ampere-bf16"):
        assert published_presets(Problem.build(llama, load_space(space))) == []


FIVE = {f"published:{name}" for name in ("torchao-tensorwise", "torchao-rowwise", "torchao-rowwise-gw-hp")}
FIVE |= {"published:te-delayed", "published:te-current"}


@functools.cache
def wide() -> GraphReport:
    """Two blocks that are wide enough for every filter of torchao, in part; a quarter of the key and value heads."""
    return decoder_report(DecoderConfig(4096, 2, 32, 14336, 1024, kv_heads=8), batch=1, seq=64)


def hopper(report: GraphReport, *, compiled: bool = True) -> Problem:
    return Problem.build(report, load_space("hopper-fp8").executed(compiled=compiled, measured=True))


def ran_by(problem: Problem, name: str, layer: str) -> LayerPlan:
    policy = problem.policy(dict(published_presets(problem))[f"published:{name}"])
    return resolve(policy, problem.layer_names)[layer]


def test_an_h100_search_has_what_people_write_by_hand_first() -> None:
    problem = hopper(wide())
    hand = [name for name, _ in by_hand(presets(problem))]
    assert {part.strip("()") for name in hand for part in name.split(" ")} >= FIVE
    assert library_presets(problem)[0] == {}
    eager = [name for name, _ in by_hand(presets(hopper(wide(), compiled=False)))]
    assert {"published:torchao-tensorwise, compiled", "published:te-delayed"} <= set(eager)


@pytest.mark.parametrize("name", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_torchaos_candidates_run_its_recipes_with_fast_accumulation_in_fprop_alone(name: str) -> None:
    wanted = NAMED.plans[name]
    found = ran_by(hopper(wide()), f"torchao-{name.replace('with_gw', 'gw').replace('_', '-')}", UP)
    kept = BUILTIN_RECIPES["bf16"]  # what wgrad is kept in under bf16 activations
    assert found == wanted.model_copy(update={} if wanted.wgrad is not None else {"wgrad": kept})
    fast = [recipe.accumulation for recipe in found.scaled]
    assert fast == ["fast", *["full"] * (len(fast) - 1)]


@pytest.mark.parametrize(("name", "history"), [("te-delayed", 1024), ("te-current", 0)])
def test_transformer_engines_candidates_are_its_defaults(name: str, history: int) -> None:
    problem = hopper(wide())
    for layer in problem.layer_names:
        found = ran_by(problem, name, layer)
        assert [recipe.accumulation for recipe in found.scaled] == ["fast", "full", "full"]
        assert found.fprop is not None
        assert found.fprop.operand_format("grad_output") == "e5m2"
        scaling = found.fprop.scaling
        assert scaling is not None
        assert (scaling.granularity, scaling.margin, scaling.power_of_2) == ("tensor", 0, False)
        assert scaling.scale == ("delayed" if history else "current")
        assert not history or (scaling.amax_history_len, scaling.amax_compute_algo) == (history, "max")


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_the_filter_is_torchaos_own(recipe: str) -> None:
    utils = pytest.importorskip("torchao.float8.float8_linear_utils")
    takes, sizes = utils._auto_filter_for_recipe(recipe, []), published(f"torchao-{recipe}").sizes
    assert sizes is not None
    edges = [16, 100, 1008, 1024, 1040, 2032, 2048, 2064, 4080, 4096, 4104, 4112, 14336]
    with torch.device("meta"):
        wrong = [
            (n, k)
            for n, k in itertools.product(edges, edges)
            if sizes.take(n, k) != takes(torch.nn.Linear(k, n, bias=False), "mlp.up")
        ]
    assert wrong == []


@pytest.mark.parametrize(
    ("name", "kind", "n", "k", "converted"),
    [
        ("torchao-rowwise-gw-hp", "linear", 1000, 64, False),
        ("torchao-rowwise-gw-hp", "linear", 64, 64, True),
        ("torchao-rowwise-gw-hp", "conv1d", 64, 64, False),
        ("te-delayed", "linear", 64, 1000, False),
        ("te-current", "linear", 64, 64, True),
        ("te-mxfp8", "linear", 48, 64, False),
    ],
)
def test_what_a_library_does_not_convert_stays_as_the_script_wrote_it(
    name: str, kind: str, n: int, k: int, converted: bool
) -> None:
    gemm = (GemmCall("fprop", 8, k, n),)
    other = Layer("up", "Linear", kind, "", "up", gemm, n * k, True, "")
    plain = Layer("mlp.fc", "Linear", "linear", "", "mlp.fc", (GemmCall("fprop", 8, 64, 64),), 4096, True, "")
    report = replace(model(), layers=(other, plain))
    found = resolve_published(f"published:{name}", report).choices
    assert found["mlp.fc"] == published(name).use
    assert (found["up"] != "keep") is converted


def test_a_default_that_cannot_be_run_is_refused_with_its_reason() -> None:
    refused, _ = library_presets(hopper(decoder(2)))
    assert refused.keys() == {"published:torchao-tensorwise", "published:torchao-rowwise"}
    assert "N or K is not a multiple of 16; N <= 1024 and K <= 4096" in refused["published:torchao-tensorwise"]
    ran = {name for name, _ in published_presets(hopper(decoder(2)))}
    assert ran & FIVE == FIVE - refused.keys()
    without = replace(wide(), layers=tuple(replace(layer, dtype="fp32") for layer in wide().layers))
    problem = Problem.build(without, load_space("hopper-fp8"), lambda _, r: (r.format != "fp8", "this card has no FP8"))
    assert set(library_presets(problem)[0].values()) == set(), "a target without FP8 is asked for none"
    problem = Problem.build(without, load_space("hopper-fp8"), lambda _, r: (_row_less(r), "no scales by row here"))
    refused, _ = library_presets(problem)
    assert refused == dict.fromkeys(("published:torchao-rowwise", "published:torchao-rowwise-gw-hp"), ROWLESS)


def _row_less(recipe: Recipe) -> bool:
    return recipe.scaling is None or recipe.scaling.granularity != "row"


def test_layers_that_a_filter_takes_apart_and_a_search_moves_together_are_said() -> None:
    report = wide()
    siblings = dict.fromkeys((f"model.layers.0.self_attn.{part}_proj" for part in "qkv"), "qkv")
    together = replace(report, groups={**report.groups, "qkv": tuple(siblings)})
    _, otherwise = library_presets(hopper(together))
    told = [line for line in otherwise if line.startswith("published:torchao-tensorwise: ")]
    assert len(told) == 1
    assert "k_proj" in told[0]
    assert "v_proj" in told[0]
    assert "q_proj" not in told[0]


def test_fast_accumulation_is_a_choice_by_gemm() -> None:
    problem = hopper(wide())
    for gemm in GEMMS:
        params = problem.params_of("fp8_rowwise", **{f"fp8_rowwise.accumulation.{gemm}": "fast"})
        plan = resolve(problem.policy(params), problem.layer_names)[UP]
        assert {g: r.accumulation for g, r in zip(GEMMS, plan.scaled, strict=True)} == {
            g: "fast" if g == gemm else "full" for g in GEMMS
        }
