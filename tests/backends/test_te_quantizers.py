"""A policy in Transformer Engine's words, against classes with TE's names."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from autoprec.backends.te_quantizers import QuantizerFactory, accumulation, check_pairs, refusal
from autoprec.errors import UnsupportedError
from autoprec.policy import LayerPlan
from autoprec.precision.recipes import BUILTIN_RECIPES
from tests.backends import fake_te

TENSOR, DELAYED, BF16 = (BUILTIN_RECIPES[name] for name in ("fp8_tensorwise", "fp8_delayed", "bf16"))


def role(name: str, operand: str) -> SimpleNamespace:
    return SimpleNamespace(name=name, tensor_type=operand)


@pytest.fixture
def factory() -> QuantizerFactory:
    made = QuantizerFactory(fake_te, fake_te, torch.device("cpu"))
    made.plans = {"up": LayerPlan(fprop=TENSOR, dgrad=TENSOR, wgrad=BF16), "down": LayerPlan.uniform(DELAYED)}
    return made


def test_an_operand_of_two_gemms_gets_a_quantizer_for_each_direction(factory: QuantizerFactory) -> None:
    found = factory(role("up", "input"))  # along rows for fprop, along columns for wgrad
    assert isinstance(found, fake_te.HybridQuantizer)
    assert isinstance(factory(role("up", "weight")), fake_te.Float8CurrentScalingQuantizer)
    assert isinstance(factory(role("down", "grad_output")), fake_te.DelayedScalingRequest)


def test_what_is_not_in_the_policy_is_left_alone_and_never_none(factory: QuantizerFactory) -> None:
    for asked in (role("other", "input"), role("up", "output"), None):
        assert isinstance(factory(asked), fake_te.IdentityQuantizer)


def test_accumulation_is_split_unless_the_recipe_says_fast() -> None:
    fast = TENSOR.model_copy(update={"accumulation": "fast"})
    full = TENSOR.model_copy(update={"accumulation": "full"})
    assert accumulation(LayerPlan(fprop=fast, dgrad=full, wgrad=None)) == (False, True, True)


@pytest.mark.parametrize(
    ("name", "said"), [("int8", "no int8"), ("fp8_rowwise", "recipe"), ("fp8_tensorwise", ""), ("mxfp8", "")]
)
def test_what_te_has_no_word_for(name: str, said: str) -> None:
    found = refusal(BUILTIN_RECIPES[name])
    assert said in found
    assert bool(found) is bool(said)


def test_delayed_scaling_is_not_mixed_within_a_layer() -> None:
    check_pairs(LayerPlan.uniform(DELAYED), "up")
    with pytest.raises(UnsupportedError, match="cannot mix delayed scaling") as caught:
        check_pairs(LayerPlan(fprop=DELAYED, dgrad=DELAYED, wgrad=BF16), "up")
    assert "'up'" in str(caught.value)
