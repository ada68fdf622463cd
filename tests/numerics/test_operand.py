"""What a layer remembers between calls, and that it is its own."""

from __future__ import annotations

import copy
import dataclasses

import torch
from pydantic import BaseModel

from autoprec.numerics.delayed.repeated import Part
from autoprec.numerics.operand import CONTRACTION, QuantizerState, ScaleRule, Spec
from autoprec.numerics.quantize import spec_of
from autoprec.precision.recipes import BUILTIN_RECIPES, GEMM_OPERANDS, Scaling

DELAYED = Spec("tensor", "e4m3", scaling=ScaleRule(scale="delayed", amax_history_len=2))


def test_a_rule_has_every_field_of_a_recipe_s_scaling_and_nothing_that_torch_2_11_cannot_trace() -> None:
    scaling = Scaling(granularity="block", power_of_2=True, amax_epsilon=0.5)
    rule = ScaleRule.of(scaling)
    for made, wanted in ((rule, scaling), (ScaleRule(), Scaling())):
        assert {**dataclasses.asdict(made), "amax_epsilon": made.epsilon} == wanted.model_dump()
    assert Spec("row", "e4m3").rule == ScaleRule()
    for recipe in BUILTIN_RECIPES.values():
        for gemm in GEMM_OPERANDS:
            for operand in GEMM_OPERANDS[gemm]:
                fields = dataclasses.asdict(spec_of(recipe, gemm, operand), dict_factory=lambda pairs: pairs)
                assert not any(isinstance(value, BaseModel) for _, value in fields)


def test_gemms_sum_over_the_axes_that_their_operands_share() -> None:
    sizes = {"input": (5, 3), "weight": (7, 3), "grad_output": (5, 7)}  # M = 5, K = 3, N = 7
    for gemm, (first, second) in CONTRACTION.items():
        one, other = (sizes[name] for name in GEMM_OPERANDS[gemm])
        assert one[first] == other[second]


def test_amaxes_are_noted_and_learnt_only_when_told() -> None:
    state = QuantizerState()
    assert state.history("input", DELAYED).seen is None
    for amax in (3.0, 1.0):
        state.delayed_scale("input", DELAYED, torch.tensor(amax), update=True)
    assert state.history("input", DELAYED).seen == 3.0
    state.history("input", DELAYED).learn(torch.tensor(7.0))  # another rank saw more
    assert state.history("input", DELAYED).seen == 0.0
    assert state.delayed_scale("input", DELAYED, torch.tensor(1.0), update=False) == 64.0


def test_a_repeated_forward_gets_the_scale_of_the_forward_it_repeats_and_teaches_nothing() -> None:
    state, part = QuantizerState(), Part()

    def forward(amax: float) -> float:
        return float(state.delayed_scale("input", DELAYED, torch.tensor(amax), update=True))

    repeat = part.beginning(forward, learns=False)
    assert repeat(1.0) == 448.0  # no history yet: its own amax
    state.history("input", DELAYED).learn(torch.tensor(2.0))
    assert forward(1.0) == 224.0
    state.history("input", DELAYED).roll()
    before = state.history("input", DELAYED).state(torch.device("cpu"))
    assert repeat(1.0) == 448.0
    assert forward(0.0) == 224.0
    after = state.history("input", DELAYED).state(torch.device("cpu"))
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_copy_stands_where_the_original_does() -> None:
    state = QuantizerState(5)
    torch.rand(4, generator=state.generator(torch.device("cpu")))
    state.delayed_scale("input", DELAYED, torch.tensor(1.0), update=True)
    state.history("input", DELAYED).roll()
    state.groups = {"weight": ("group",)}
    twin = copy.deepcopy(state)
    assert twin.groups == state.groups  # a copied layer of tensor parallelism reduces its amaxes, too
    assert torch.equal(twin.delayed["input", DELAYED].history, state.delayed["input", DELAYED].history)
    assert twin.delayed["input", DELAYED] is not state.delayed["input", DELAYED]
    drawn = [torch.rand(4, generator=one.generator(torch.device("cpu"))) for one in (state, twin)]
    assert torch.equal(*drawn)


def test_the_private_stream_leaves_the_global_one_alone() -> None:
    before = torch.random.get_rng_state()
    torch.rand(9, generator=QuantizerState(1).generator(torch.device("cpu")))
    assert torch.equal(before, torch.random.get_rng_state())
