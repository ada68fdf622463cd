"""Modules that hold an optimizer's parameters are found among what is alive."""

from __future__ import annotations

import copy

import torch
from torch import nn

from autoprec.optim.holders import models_holding, tables_among
from autoprec.optim.optimizer import wrap_optimizer
from autoprec.optim.tensor import StoredTensor
from autoprec.policy import OptimizerPolicy


def test_the_outermost_models_are_found_in_the_order_of_their_parameters() -> None:
    first, second, other = nn.Sequential(nn.Linear(2, 2)), nn.Linear(2, 2), nn.Linear(2, 2)
    around = nn.ModuleDict({"inner": first, "beside": nn.Linear(2, 2)})
    assert models_holding([second.weight, first[0].bias]) == [second, around]
    assert models_holding([first[0].weight, second.weight]) == [around, second]
    assert models_holding([nn.Parameter(torch.zeros(1))]) == []
    assert models_holding(other.parameters()) == [other]


def test_a_part_of_two_models_leads_to_both() -> None:
    shared = nn.Linear(2, 2)
    one, two = nn.Sequential(shared), nn.Sequential(nn.Tanh(), shared)
    assert sorted(map(id, models_holding([shared.weight]))) == sorted([id(one), id(two)])


def test_tables_are_known_by_their_modules_tied_or_copied() -> None:
    class Own(nn.Embedding):
        """A script's own."""

    table, bag, own = nn.Embedding(4, 2), nn.EmbeddingBag(4, 2), Own(4, 2)
    head = nn.Linear(2, 4, bias=False)
    head.weight = table.weight
    copied = copy.deepcopy(own)
    weights = [head.weight, bag.weight, own.weight, copied.weight, nn.Linear(2, 2).weight]
    assert tables_among(weights) == {id(weight) for weight in weights[:4]}


def test_a_copy_of_a_model_with_stored_weights_goes_on_with_what_is_remembered() -> None:
    model = nn.Sequential(nn.Embedding(4, 8), nn.Linear(8, 8, bias=False))
    choice = OptimizerPolicy(weights="bf16_kahan")
    wrap_optimizer(torch.optim.AdamW(model.parameters()), choice)
    twin = copy.deepcopy(model)
    wrap_optimizer(torch.optim.AdamW(twin.parameters()), choice)
    assert type(twin[0].weight) is nn.Parameter
    assert isinstance(twin[1].weight, StoredTensor)
    assert torch.equal(twin[1].weight.exact(), model[1].weight.exact())


def test_a_pair_of_optimizers_is_known_without_the_model() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 2))
    choice = OptimizerPolicy(exp_avg="bf16", exp_avg_sq="int8_block")
    hidden = torch.optim.Muon([model[0].weight])
    rest = torch.optim.AdamW([p for p in model.parameters() if p is not model[0].weight])
    norms = torch.optim.AdamW(model[1].parameters())
    for optimizer in (hidden, rest, norms):
        wrap_optimizer(optimizer, choice)
    model(torch.ones(2, 8)).sum().backward()
    for optimizer in (hidden, rest):
        optimizer.step()
    assert isinstance(hidden.state[model[0].weight]["momentum_buffer"], StoredTensor)
    assert isinstance(rest.state[model[2].weight]["exp_avg_sq"], StoredTensor)
