"""Which module is the copy of a model that generates, as the script says."""

import copy

import pytest
import torch
from torch import nn

from autoprec.applying.generating.pairs import copies_of, in_step, is_recognised, pair, recognise, rollout_of
from autoprec.errors import UsageError


def mlp(width: int = 16) -> nn.Module:
    return nn.Sequential(nn.Linear(16, width), nn.Linear(width, 16))


def test_a_copy_is_known_by_its_model_inside_any_wrapper() -> None:
    model = mlp()
    rollout = copy.deepcopy(model)
    assert rollout_of(model) is None
    pair(nn.DataParallel(model), rollout)
    assert rollout_of(model) is rollout
    assert rollout_of(rollout) is None


@pytest.mark.parametrize(
    ("other", "why"),
    [
        (lambda _model: mlp(32), "differ in 0.weight, 0.bias"),
        (lambda _model: nn.Sequential(nn.Linear(16, 16)), "differ in 1.bias, 1.weight"),
        (lambda model: model, "one side only"),
        (lambda model: nn.Sequential(*model), "one side only"),
    ],
)
def test_what_is_not_a_copy_of_its_own_is_refused(other: object, why: str) -> None:
    model = mlp()
    with pytest.raises(UsageError, match=why):
        pair(model, other(model))  # type: ignore[operator]
    assert rollout_of(model) is None


def test_the_only_copy_that_there_is_needs_no_name() -> None:
    model, other = mlp(24), mlp(25)
    assert recognise(model) is None
    rollout = copy.deepcopy(model).to(torch.bfloat16)
    wrapped = nn.DataParallel(rollout)
    assert copies_of(nn.DataParallel(model)) == [rollout]
    assert recognise(model) is rollout is rollout_of(model)
    assert is_recognised(model)
    assert recognise(other) is None
    del wrapped


def test_of_several_copies_only_the_named_one_is_taken() -> None:
    model = mlp(26)
    frozen, rollout = copy.deepcopy(model), copy.deepcopy(model)
    assert recognise(model) is None
    assert len(copies_of(model)) == 2
    pair(model, rollout)
    assert recognise(model) is rollout
    assert not is_recognised(model)
    assert frozen is not rollout


@pytest.mark.parametrize("other", [
    lambda model: nn.Sequential(*model),
    lambda model: nn.Sequential(*(copy.deepcopy(one) if [*one.parameters()] else one for one in model)),
    lambda model: copy.deepcopy(model).to("meta"),
    lambda _model: nn.Sequential(nn.Linear(16, 27), nn.Linear(27, 16), nn.Linear(16, 16)),
    lambda _model: nn.Sequential(nn.LazyLinear(27), nn.LazyLinear(16)),
    lambda _model: nn.Sequential(nn.Linear(16, 28), nn.Linear(28, 16)),
])  # fmt: skip
def test_what_shares_weights_has_none_or_others_is_not_a_copy(other: object) -> None:
    model = nn.Sequential(*mlp(27), nn.ReLU())  # type: ignore[misc]
    kept = other(model)  # type: ignore[operator]
    assert copies_of(model) == []
    assert kept is not model


def test_a_copy_is_in_step_while_it_has_the_weights_of_the_model_rounded_to_its_own_dtype() -> None:
    model = mlp()
    rollout = copy.deepcopy(model).to(torch.bfloat16)
    assert in_step(model, rollout)
    with torch.no_grad():
        model[0].weight.mul_(1.1)  # type: ignore[index]
    assert not in_step(model, rollout)
    rollout.load_state_dict(model.state_dict())
    assert in_step(model, rollout)
