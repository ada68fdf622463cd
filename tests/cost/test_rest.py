from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import get_args

import pytest

from autoprec.cost import rest
from autoprec.cost.model import CostModel
from autoprec.cost.rates import default_rates
from autoprec.cost.rest import (
    OTHER,
    beside_bytes,
    category,
    exchange_seconds,
    growth,
    optimizer_bytes,
    rest_cost,
    rest_operators,
    scaled_newton_schulz,
    scaled_products,
    second_moments,
)
from autoprec.cost.scale import CostScale
from autoprec.graph.report import GraphReport, NewtonSchulz, Operator, StepProduct
from autoprec.optim.codecs import CODECS
from autoprec.policy.sections import OptimizerPolicy
from autoprec.precision.hardware import TARGETS

H100 = TARGETS["h100"]
RATES = default_rates(H100)


def operator(cls: str, module: str = "h.0", **changes: object) -> Operator:
    row = Operator("x", module, "op", "forward", cls, "follow", "", (), ("fp32",), 1_000_000, 4_000_000)
    return replace(row, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "cls", ["attention", "softmax", "norm", "pointwise", "loss", "embedding", "unheard of", "gemm"]
)
def test_every_class_has_a_category(cls: str) -> None:
    assert category(cls) in OTHER


def test_gemms_of_layers_and_views_are_not_counted_again(tiny: GraphReport) -> None:
    weight = tiny.layers[0].weight
    rows = (operator("gemm", weight=weight), operator("view"), operator("norm"), operator("gemm", module="loose"))
    found = rest_operators(replace(tiny, operators=rows))
    assert {index: row.cls for index, row in found.items()} == {2: "norm", 3: "gemm"}


def test_attention_is_what_attends(tiny: GraphReport) -> None:
    """A recommender without attention was said to spend 23 % of a step on it: a product of two activations."""
    scores, values = (operator("attention", "h.0.attn", pattern=kind) for kind in ("scores", "values"))
    inside = operator("softmax", "h.0.attn.softmax")
    rows = (scores, inside, values, operator("attention", "interaction"), operator("softmax", "gate"))
    found = {(row.module, category(row.cls)) for row in rest_operators(replace(tiny, operators=rows)).values()}
    attends = {("h.0.attn", "attention"), ("h.0.attn.softmax", "attention")}
    assert found == attends | {("interaction", "product"), ("gate", "other")}
    model = CostModel(replace(tiny, operators=(operator("attention", "interaction"),)), H100)
    assert model.estimate({}).breakdown["attention"] == 0 < model.estimate({}).breakdown["product"]


def collective(op: str, rows: int, made: int) -> Operator:
    more = {"shapes": ((rows, 1000),), "out_shapes": ((made, 1000),), "out_dtypes": ("fp32",)}
    return operator("collective", op=f"_c10d_functional::{op}", flops=0, **more)


def test_exchanges_of_tensor_parallelism_go_over_the_links(tiny: GraphReport) -> None:
    """By hand: 4 MB at 450 GB/s; a gather from 250 to 1000 rows receives 3 MB."""
    reduced, gathered = collective("all_reduce", 1000, 1000), collective("all_gather_into_tensor", 250, 1000)
    assert exchange_seconds(reduced, H100) == pytest.approx(4e6 / 450e9)
    assert exchange_seconds(gathered, H100) == pytest.approx(3e6 / 450e9)
    scale = CostScale(width=2, depth=3, tokens=4)
    wide, low = (rest_cost(H100, RATES, [reduced], scale, activations=a) for a in ("keep", "bf16"))
    assert wide.seconds["other"] == pytest.approx(24 * 4e6 / 450e9)
    assert low.seconds["other"] == pytest.approx(12 * 4e6 / 450e9)
    waits = [collective(op, 1000, 1000) for op in ("wait_tensor", "_wrap_tensor_autograd")]
    assert rest_operators(replace(tiny, operators=(reduced, *waits))) == {0: reduced}


def test_every_modelled_time_of_a_divided_model_says_what_is_left_out(tiny: GraphReport) -> None:
    divided = replace(tiny, operators=(*tiny.operators, collective("all_reduce", 1000, 1000)))
    assert divided.divided
    assert CostModel(divided, H100).estimate({}).label.endswith("gains are upper bounds")
    clipped = replace(tiny, operators=(replace(collective("all_reduce", 1, 1), phase="update"),))  # FSDP2's norm
    assert not clipped.divided
    assert "ranks" not in CostModel(tiny, H100).label


def test_attention_has_a_peak_on_a_device_that_lists_bf16_alone() -> None:
    bare = replace(H100, peaks={"bf16": 989.0})
    found = rest_cost(bare, RATES, [operator("attention")], CostScale())
    assert found.seconds["attention"] > 0


def test_growth_by_class() -> None:
    scale = CostScale(width=2, depth=3, tokens=4, seq=2)
    assert growth(operator("attention"), scale) == (48, 24)
    assert growth(operator("softmax"), scale) == (24, 24)
    assert growth(operator("loss"), scale) == (4, 4)
    assert growth(operator("norm"), scale) == (24, 24)
    assert growth(operator("norm", module="final"), scale) == (8, 8)


def test_autocast_halves_pointwise_traffic_but_not_norms() -> None:
    rows = [operator("pointwise"), operator("norm")]
    wide, low = (rest_cost(H100, RATES, rows, CostScale(), activations=a) for a in ("keep", "bf16"))
    assert low.seconds["pointwise"] == pytest.approx(wide.seconds["pointwise"] / 2)
    assert low.seconds["norm"] == wide.seconds["norm"]


def test_compilers_fuse() -> None:
    rows = [operator("pointwise")] * 10
    fused, eager = (rest_cost(H100, RATES, rows, CostScale(), compiled=c) for c in (True, False))
    assert fused.seconds["pointwise"] < eager.seconds["pointwise"]
    assert fused.kernels < eager.kernels == 10


def test_every_optimizer_policy_has_a_size() -> None:
    fields = OptimizerPolicy.model_fields
    names = ("weights", "exp_avg", "exp_avg_sq", "gradients")
    for values in product(*(get_args(fields[name].annotation) for name in names)):
        stored, moved = optimizer_bytes(OptimizerPolicy(**dict(zip(names, values, strict=True))))
        assert 2 < stored <= 12
        assert 2 * stored < moved <= 2 * stored + 4


def test_products_of_a_step_grow_on_all_sides() -> None:
    report = GraphReport({}, (), (), {}, 0, 0.0, newton_schulz=(NewtonSchulz(512, 1024, 5, 4),))
    scale = CostScale(width=2.0, depth=3.0)
    assert scaled_products(report, scale)[0] == StepProduct(1024, 2048, 1024, "bf16", calls=60)


def test_what_muon_trains_has_no_second_moment() -> None:
    report = GraphReport({}, (), (), {}, 0, 0.0, newton_schulz=(NewtonSchulz(512, 1024, 5, 4),))
    (wide,) = scaled_newton_schulz(report, CostScale(width=2.0, depth=3.0))
    assert wide == NewtonSchulz(1024, 2048, 5, 12)
    assert second_moments([wide], 2.0 * 12 * 1024 * 2048) == 0.5
    assert second_moments([wide], 1.0) == 0.0
    assert second_moments([], 10.0) == 1.0
    half, all_of_it = (optimizer_bytes(OptimizerPolicy(), share) for share in (0.5, 1.0))
    assert (half[0], all_of_it[0]) == (10.0, 12.0)
    assert half[1] < all_of_it[1]


@pytest.mark.parametrize(
    ("stored", "moments", "more"),
    [
        ({}, True, 0.0),
        ({"weights": "bf16_kahan"}, True, 4.0),
        ({"weights": "bf16_kahan"}, False, 4.0),
        ({"weights": "bf16_stochastic", "exp_avg_sq": "fp16_scaled"}, True, 2.0),
        ({"exp_avg": "e4m3", "exp_avg_sq": "fp16_scaled"}, True, -0.96875),
        ({"exp_avg": "e4m3", "exp_avg_sq": "int8_block"}, True, -1.953125),
    ],
)
def test_of_a_model_in_sixteen_bits_exact_weights_lie_beside_it(stored, moments, more):
    assert beside_bytes(OptimizerPolicy(**stored), moments=moments) == pytest.approx(more)


def test_bytes_of_stored_values_are_those_of_their_codecs():
    tables = {
        "weights": rest._WEIGHT_BYTES,
        "exp_avg": rest.GRADIENT_BYTES,
        "exp_avg_sq": rest._EXP_AVG_SQ_BYTES,
        "gradients": rest.GRADIENT_BYTES,
    }
    modelled = {(what, name): size for what, table in tables.items() for name, size in table.items() if name != "fp32"}
    assert modelled == {key: codec.bits / 8 for key, codec in CODECS.items()}
