"""What a layer is, read from the names that libraries give it."""

import pytest

from autoprec.errors import UnknownNameError, UsageError
from autoprec.graph.report import GemmCall, Layer
from autoprec.graph.roles import parse_hints, places, shown
from benchmarks.cost.decoder import DecoderConfig, decoder_report


def layer(name: str, k: int = 64, n: int = 64, kind: str = "linear", flags: tuple[str, ...] = ()) -> Layer:
    return Layer(name, "Linear", kind, "", name, (GemmCall("fprop", 8, k, n),), k * n, True, "", flags)


def roles(*names: str) -> dict[str, str]:
    return {name: place.role for name, place in places([layer(name) for name in names]).items()}


FAMILIES = {
    "gpt2": {
        "attn.c_attn": "attention.qkv",
        "attn.c_proj": "attention.out",
        "mlp.c_fc": "mlp.in",
        "mlp.c_proj": "mlp.out",
    },
    "llama": {
        "self_attn.q_proj": "attention.qkv",
        "self_attn.o_proj": "attention.out",
        "mlp.gate_proj": "mlp.in",
        "mlp.up_proj": "mlp.in",
        "mlp.down_proj": "mlp.out",
    },
    "phi": {"self_attn.dense": "attention.out", "mlp.fc1": "mlp.in", "mlp.fc2": "mlp.out"},
    "bert": {
        "attention.self.query": "attention.qkv",
        "attention.output.dense": "attention.out",
        "intermediate.dense": "mlp.in",
        "output.dense": "mlp.out",
    },
    "deberta": {"attention.self.pos_key_proj": "attention.qkv"},
    "t5": {
        "layer.0.SelfAttention.q": "attention.qkv",
        "layer.1.EncDecAttention.o": "cross_attention.out",
        "layer.2.DenseReluDense.wi_0": "mlp.in",
        "layer.2.DenseReluDense.wo": "mlp.out",
    },
    "cross": {"cross.q": "cross_attention.qkv", "cross.proj": "cross_attention.out"},
    "bart": {"encoder_attn.k_proj": "cross_attention.qkv", "fc1": "mlp.in", "fc2": "mlp.out"},
    "rwkv": {"attention.receptance": "attention.qkv", "feed_forward.value": "mlp.out"},
    "mamba": {"mixer.in_proj": "mixer.in", "mixer.x_proj": "mixer.inner", "mixer.out_proj": "mixer.out"},
    "deepseek": {
        "self_attn.kv_a_proj_with_mqa": "attention.qkv",
        "mlp.shared_experts.up_proj": "shared_expert.in",
        "mlp.experts.3.down_proj": "expert.out",
        "mlp.gate": "router",
    },
    "torch": {"self_attn.in_proj": "attention.qkv", "linear1": "mlp.in", "linear2": "mlp.out"},
    "torchtitan": {"attention.wq": "attention.qkv", "attention.wo": "attention.out", "feed_forward.w2": "mlp.out"},
    "megatron": {
        "self_attention.linear_qkv": "attention.qkv",
        "self_attention.linear_proj": "attention.out",
        "mlp.linear_fc1": "mlp.in",
        "mlp.linear_fc2": "mlp.out",
    },
    "plain": {"attn.qkv": "attention.qkv", "attn.proj": "attention.out", "fc": "mlp.in", "proj": "mlp.out"},
    "sequential": {"mlp.0": "mlp.in", "mlp.2": "mlp.out"},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_names_of_a_family_tell_the_roles_of_its_layers(family: str) -> None:
    names = {f"model.h.{block}.{leaf}": role for block in range(2) for leaf, role in FAMILIES[family].items()}
    assert roles(*names) == names


def test_what_is_outside_the_blocks() -> None:
    found = roles("h.0.fc1", "lm_head", "classifier", "bert.pooler.dense", "vit.patch_embed.proj", "wte_proj")
    assert [found[name] for name in ("lm_head", "classifier", "bert.pooler.dense")] == ["head"] * 3
    assert found["vit.patch_embed.proj"] == "embedding"
    assert found["wte_proj"] == ""


def test_convolutions_have_stages_and_shortcuts() -> None:
    names = ("stem", "layer1.0.conv1", "layer1.0.conv2", "layer2.0.conv1", "layer2.0.conv2", "layer2.0.downsample.0")
    found = places([layer(name, kind="conv", flags=("first",) if name == "stem" else ()) for name in names])
    assert [found[name].role for name in names] == ["embedding", *["conv"] * 4, "conv.shortcut"]
    assert [(found[name].rank, found[name].count) for name in names[1:5]] == [(0, 2), (0, 2), (1, 2), (1, 2)]


def test_depth_is_counted_per_stack_and_role() -> None:
    report = decoder_report(DecoderConfig(64, 5, 2, 128, 96), batch=1, seq=16)
    found = places(report.layers)
    assert [(p.rank, p.count) for n, p in found.items() if n.endswith("o_proj")] == [(i, 5) for i in range(5)]
    assert (found["lm_head"].rank, found["lm_head"].count) == (0, 1)
    two = places([layer(f"{s}.layers.{i}.fc1") for s in ("encoder", "decoder") for i in range(3)])
    assert {p.stack for p in two.values()} == {"encoder", "decoder"}
    assert max(p.rank for p in two.values()) == 2


def test_experts_of_one_block_are_at_one_depth() -> None:
    found = places([layer(f"h.{b}.moe.experts.{e}.w1") for b in range(2) for e in range(4)])
    assert {(p.role, p.rank, p.count) for p in found.values()} == {("expert.in", 0, 2), ("expert.in", 1, 2)}


@pytest.mark.parametrize(("k", "n", "guess"), [(8, 24, "attention.qkv"), (8, 8, "attention.out"), (8, 32, "mlp.in")])
def test_a_name_that_says_nothing_leaves_a_guess_and_no_role(k: int, n: int, guess: str) -> None:
    place = places([layer("h.0.mystery", k, n)])["h.0.mystery"]
    assert (place.role, place.guess) == ("", guess)


def test_a_hint_comes_before_the_name() -> None:
    found = places([layer("h.0.fc1"), layer("h.0.odd")], parse_hints(["*.odd=mlp.out", "*.fc1=attention.qkv"]))
    assert [place.role for place in found.values()] == ["attention.qkv", "mlp.out"]
    with pytest.raises(UnknownNameError, match=r"mlp\.out"):
        parse_hints(["*.odd=mlp.outt"])
    with pytest.raises(UsageError, match="GLOB=ROLE"):
        parse_hints(["odd"])


def test_many_names_are_shown_in_a_few_words() -> None:
    assert shown([f"h.{i}.fc1" for i in range(12)] + ["head"]) == "h.{0-11}.fc1, head"
    assert shown(["h.0.fc1", "h.2.fc1"]) == "h.{0,2}.fc1"
    assert shown([f"h.{i}.{c}" for c in "abcdef" for i in (1,)]).endswith("and 2 more kinds")


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (("h.0.attn.qkv", "h.1.mamba.in_proj", "h.2.mlp.fc"), [(0, 3), (1, 3), (2, 3)]),  # a hybrid
        (("h.0.moe.experts.0.up", "h.0.moe.experts.1.up", "h.1.fc"), [(0, 2), (0, 2), (1, 2)]),
        (("b.0.layer.0.attn.q", "b.0.layer.1.mlp.wi", "b.1.layer.0.attn.q"), [(0, 2), (0, 2), (1, 2)]),  # T5
        (("s.0.blocks.0.fc", "s.0.blocks.1.fc", "s.1.blocks.0.fc"), [(0, 3), (1, 3), (2, 3)]),  # Swin
        (("layer1.0.conv", "layer1.1.conv", "layer2.0.conv"), [(0, 3), (1, 3), (2, 3)]),  # ResNet
        (("model.layers.0.fc", "model.layers.1.fc", "mtp.0.fc", "lm_head"), [(0, 2), (1, 2), (0, 1), (-1, 0)]),
    ],
)
def test_the_blocks_of_a_model_whatever_is_in_them(names: tuple[str, ...], expected: list[tuple[int, int]]) -> None:
    found = places([layer(name) for name in names])
    assert [(found[name].block, found[name].blocks) for name in names] == expected
