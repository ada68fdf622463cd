from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoprec.cost.scale import CostScale, GemmWork, in_block, layer_works, scaled_parameters, short_dtype
from autoprec.errors import UsageError
from autoprec.graph.report import GemmCall, GraphReport, Layer
from benchmarks.cost.decoder import DecoderConfig, decoder_report


def test_parse_reads_any_subset() -> None:
    assert CostScale.parse("width=16,depth=4,tokens=32") == CostScale(16, 4, 32)
    assert CostScale.parse(" tokens=2 ") == CostScale(tokens=2)
    assert CostScale.parse("").is_identity
    assert CostScale.parse("width=16,seq=2").describe() == "width=16,seq=2"


@pytest.mark.parametrize("text", ["widht=2", "width", "width=x", "width=0", "width=-1", "width=nan", "width=1,width=2"])
def test_parse_refuses(text: str) -> None:
    with pytest.raises(UsageError):
        CostScale.parse(text)


def test_a_misspelt_key_names_the_nearest() -> None:
    with pytest.raises(UsageError, match="did you mean 'width'"):
        CostScale.parse("widht=2")


@pytest.mark.parametrize(
    ("text", "short"),
    [
        ("torch.bfloat16", "bf16"),
        ("bf16", "bf16"),
        ("float16", "fp16"),
        ("float32", "fp32"),
        ("", "fp32"),
        ("float64", "fp64"),
    ],
)
def test_dtypes_are_recognised(text: str, short: str) -> None:
    assert short_dtype(text) == short


@pytest.mark.parametrize(
    ("name", "inside"),
    [("h.0.mlp", True), ("layers.11", True), ("lm_head", False), ("conv1.weight", False), ("", False)],
)
def test_blocks_are_numbered(name: str, inside: bool) -> None:
    assert in_block(name) is inside


def layer(name: str, flags: tuple[str, ...] = (), roles: tuple[str, ...] = ("fprop", "dgrad", "wgrad")) -> Layer:
    calls = {
        "fprop": GemmCall("fprop", 64, 32, 16),
        "dgrad": GemmCall("dgrad", 64, 16, 32),
        "wgrad": GemmCall("wgrad", 16, 64, 32),
    }
    return Layer(name, "Linear", "linear", f"{name}.weight", name, tuple(calls[r] for r in roles), 512, True, "", flags)


@pytest.mark.parametrize("roles", [("fprop", "dgrad", "wgrad"), ("dgrad", "wgrad"), ("wgrad",), ("fprop", "wgrad")])
def test_shapes_come_from_whatever_role_ran(roles: tuple[str, ...]) -> None:
    (work,) = layer_works(layer("h.0.fc", roles=roles), CostScale())
    assert (work.tokens, work.inp, work.out) == (64, 32, 16)
    assert work.roles == roles


def test_roles_have_their_own_shapes() -> None:
    (work,) = layer_works(layer("h.0.fc"), CostScale())
    assert work.dims("fprop") == (64, 32, 16)
    assert work.dims("dgrad") == (64, 16, 32)
    assert work.dims("wgrad") == (16, 64, 32)
    assert work.elements("input") == 64 * 32
    assert work.elements("weight") == 32 * 16
    assert work.elements("grad_output") == 64 * 16
    assert work.flops == 3 * 2 * 64 * 32 * 16


def test_width_spares_the_vocabulary_and_the_input() -> None:
    scale = CostScale(width=4, depth=3, tokens=2)
    (block,) = layer_works(layer("h.0.fc"), scale)
    assert (block.tokens, block.inp, block.out, block.copies) == (128, 128, 64, 3)
    (head,) = layer_works(layer("lm_head", ("head",)), scale)
    assert (head.inp, head.out, head.copies) == (128, 16, 1)
    (first,) = layer_works(layer("patch", ("first",)), scale)
    assert (first.inp, first.out) == (32, 64)


@pytest.mark.parametrize("flag", ["router", "narrow"])
def test_the_number_of_experts_and_classes_does_not_widen(flag: str) -> None:
    """A router of 16 outputs that was costed with 256 got FP8, from which it gains nothing."""
    router = layer("h.0.router", (flag,))
    (work,) = layer_works(router, CostScale(width=16))
    assert (work.inp, work.out) == (32 * 16, 16)
    report = GraphReport({"class": "M", "parameters": 512}, (router,), (), {}, 0, 0.0)
    assert scaled_parameters(report, CostScale(width=16)) == 512 * 16


@given(st.floats(0.5, 64), st.floats(1, 8), st.floats(1, 64))
def test_flops_grow_as_the_factors_say(width: float, depth: float, tokens: float) -> None:
    (plain,) = layer_works(layer("h.0.fc"), CostScale())
    (scaled,) = layer_works(layer("h.0.fc"), CostScale(width, depth, tokens))
    assert scaled.flops == pytest.approx(plain.flops * width**2 * depth * tokens, rel=0.1)


def test_scaled_parameters_match_the_larger_model() -> None:
    small = decoder_report(DecoderConfig(64, 2, 4, 256, 100, gated=False), batch=1, seq=16)
    big = decoder_report(DecoderConfig(256, 8, 4, 1024, 100, gated=False), batch=1, seq=16)
    found = scaled_parameters(small, CostScale(width=4, depth=4))
    assert found == pytest.approx(big.model["parameters"], rel=0.05)
    assert scaled_parameters(small, CostScale()) == small.model["parameters"]


def test_a_layer_without_gemms_costs_nothing() -> None:
    empty = Layer("h.0.x", "Linear", "linear", "w", "g", (), 1, False, "never called")
    assert layer_works(empty, CostScale()) == ()
    report = GraphReport({"class": "M"}, (empty,), (), {}, 0, 0.0)
    assert scaled_parameters(report, CostScale(width=2)) == 4


def _recurrent(flags: tuple[str, ...] = ()) -> Layer:
    """An LSTM of 32 units over 8 steps of 4 samples, two layers of 16 and 32 inputs."""
    shapes = [(32, 16, 1), (4, 32, 16), (32, 32, 1)]  # inputs of the first layer, the states of both, of the second
    gemms = tuple(GemmCall("fprop", m, k, 128, calls) for m, k, calls in shapes)
    return Layer("rnn", "LSTM", "rnn", "rnn.weight_ih_l0", "rnn", gemms, 2048, True, "", flags)


def test_a_recurrent_layer_multiplies_step_by_step_and_casts_once() -> None:
    first, state, second = layer_works(_recurrent(), CostScale())
    assert [(work.tokens, work.copies, work.casts) for work in (first, state, second)] == [
        (32, 1, 1),
        (4, 16, 2),
        (32, 1, 1),
    ]
    first, state, second = layer_works(_recurrent(("first",)), CostScale(width=2, tokens=6, seq=3))
    assert (first.tokens, first.inp, second.inp) == (192, 16, 64)
    assert (state.tokens, state.inp, state.copies, state.casts) == (8, 64, 48, 2)


def test_a_recomputed_forward_counts_as_a_role() -> None:
    work = GemmWork(8, 8, 8, 1, 1.0, ("fprop", "recompute"))
    assert work.dims("recompute") == work.dims("fprop")
    assert work.flops == 2 * 2 * 512
