"""Who is who: the parameter behind a tensor, the forward product behind a backward GEMM."""

import pytest
import torch
from torch import nn

from autoprec.graph.analysis.linking import link
from autoprec.graph.analysis.rules import builtin_rules
from autoprec.graph.recorder import StepRecorder


def links(model, step):
    with StepRecorder(model) as recorder:
        step()
    return link(recorder.trace, recorder.names, builtin_rules())


def roles(found):
    return sorted((p.role, p.weight) for p in found.products)


def test_a_linear_layer_is_one_product_forward_and_two_backward():
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    found = links(model, lambda: model(torch.randn(3, 4)).sum().backward())
    assert roles(found) == [
        ("dgrad", "2.weight"),
        ("fprop", "0.weight"),
        ("fprop", "2.weight"),
        ("wgrad", "0.weight"),
        ("wgrad", "2.weight"),
    ]
    assert not found.unmatched
    assert {p.layer_module for p in found.products if p.weight == "2.weight"} == {"2"}


@pytest.mark.parametrize(
    "form", [lambda w: w.t().contiguous(), lambda w: (w * 0.5).t(), lambda w: w.bfloat16().float().t()]
)
def test_a_parameter_is_followed_through_what_only_changes_its_form(form):
    model = nn.Linear(4, 6, bias=False)
    found = links(model, lambda: (torch.randn(3, 4) @ form(model.weight)).sum().backward())
    assert ("fprop", "weight") in roles(found)
    assert ("wgrad", "weight") in roles(found)


def test_a_tensor_mixed_with_an_activation_is_not_a_parameter_any_more():
    model = nn.Linear(4, 4, bias=False)
    x = torch.randn(4, 4)
    found = links(model, lambda: (x @ (model.weight + x)).sum().backward())
    assert {p.weight for p in found.products} == {""}


def test_products_of_two_activations_have_agrads():
    model = nn.Linear(4, 4, bias=False)

    def step():
        y = model(torch.randn(3, 4))
        (y @ y.t()).sum().backward()

    found = links(model, step)
    assert [role for role, weight in roles(found) if not weight] == ["agrad", "agrad", "fprop"]


def test_a_layer_that_is_used_twice_keeps_its_gemms_apart():
    model = nn.Linear(4, 4, bias=False)
    found = links(model, lambda: model(model(torch.randn(3, 4))).sum().backward())
    assert roles(found) == [("dgrad", "weight")] + [("fprop", "weight")] * 2 + [("wgrad", "weight")] * 2
    forwards = {p.call.index for p in found.products if p.role == "fprop"}
    assert {p.layer_call.index for p in found.products if p.role == "wgrad"} == forwards
