"""Weights that no module holds: how they are called, and whether they are trained."""

import dataclasses

import pytest
import torch
from torch import nn

from autoprec.trial.inside.observe.loose import (
    LooseWeights,
    Watch,
    are_plain_weights,
    loose_weights_of,
    names_of,
    plain_leaves,
)


def leaf(*shape: int) -> torch.Tensor:
    return torch.ones(*shape, requires_grad=True)


@dataclasses.dataclass(slots=True)
class Pair:
    gain: torch.Tensor
    bias: torch.Tensor


class Own:
    __slots__ = ("weight",)

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight


def test_weights_are_called_what_the_script_calls_them() -> None:
    a, b, c, d, e = leaf(2), leaf(3), leaf(4), leaf(5), leaf(6)
    params = {"first": a, "layers": [Pair(b, c), Own(d)]}
    for one in (a, e):  # the variable of a loop is not what holds it
        last = one
    assert last is e
    assert len(params) == 2
    assert list(names_of([a, b, c, d])) == [
        "params.first",
        "params.layers.0.gain",
        "params.layers.0.bias",
        "params.layers.1.weight",
    ]
    assert list(names_of([leaf(1), a])) == ["weight.0", "params.first"]
    assert next(iter(names_of([e]))) in ("e", "one", "last")


def test_other_tensors_are_followed_by_name_and_else_by_order() -> None:
    params = {"first": leaf(2), "last": leaf(3)}
    root = LooseWeights(list(params.values()))
    before = list(root.parameters())
    params = {name: leaf(*p.shape) for name, p in params.items()}
    moved = root.follow(list(params.values()))
    assert [moved[id(old)] for old in before] == list(params.values()) == list(root.parameters())
    assert [name for name, _ in root.named_parameters()] == ["params.first", "params.last"]
    assert root.follow([leaf(7)]) == {}  # another loss
    assert list(root.parameters()) == list(params.values())
    assert root.follow({"params.first": before[0]}) == {id(params["first"]): before[0]}


def test_a_loss_that_trains_a_module_has_no_plain_leaves() -> None:
    weight, net = leaf(2), nn.Linear(2, 1)
    plain, both = (weight * 2).sum(), net(weight).sum()
    assert plain_leaves((plain,)) == [weight]
    assert plain_leaves((both,)) == []
    assert are_plain_weights((plain,), (weight,))
    assert not are_plain_weights((both,), (weight,))
    assert not are_plain_weights((plain,), (weight * 2,))


def test_an_optimizer_of_copies_does_not_train_what_the_loss_reaches() -> None:
    weight, copy = leaf(2), leaf(2)
    assert loose_weights_of([torch.optim.SGD([weight, copy])], [weight]) == [weight]
    assert loose_weights_of([torch.optim.SGD([copy])], [weight]) == []


@pytest.mark.parametrize(
    ("how", "trained"),
    [
        ("in place", True),
        ("its data", True),
        ("foreach", True),
        ("a new tensor", True),
        ("of a master copy", True),
        ("another batch", False),
        ("nothing", False),
        ("read alone", False),
    ],
)
def test_what_a_gradient_reaches_between_two_backward_passes_is_trained(how: str, trained: bool) -> None:
    weight, master = leaf(3), torch.ones(3)
    (weight * 2).sum().backward()
    gradient = weight.grad
    assert gradient is not None
    watch, now = Watch([weight]), weight
    assert watch.trained([weight]) == []  # it has not begun
    watch.begin()
    with torch.no_grad():
        if how == "in place":
            weight -= gradient
        elif how == "its data":
            weight.data.sub_(gradient)
        elif how == "foreach":
            torch._foreach_add_([weight], [gradient])
        elif how == "a new tensor":
            now = (weight - gradient).requires_grad_()
        elif how == "of a master copy":
            master.sub_(gradient)
            now = master.clone().requires_grad_()
        elif how == "another batch":
            now = torch.randn(3).requires_grad_()
        elif how == "read alone":
            float(weight.norm())
    assert watch.trained([now]) == ([now] if trained else [])
    assert watch.trained([now]) == []
    watch.end()


def test_where_another_loss_follows_the_weights_stay_what_they_were() -> None:
    weight, other = leaf(3), leaf(3)
    watch = Watch([weight])
    watch.begin()
    weight.data.sub_(1.0)
    assert watch.trained([other]) == [weight]
