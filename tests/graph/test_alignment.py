"""Alignment: what multiples the GEMMs of a layer allow, tokens included."""

import torch
from torch import nn

from autoprec.graph.alignment import alignment, blockers
from autoprec.graph.recorder import record_step


def layer(tokens, width_in, width_out):
    model = nn.Linear(width_in, width_out)
    x = torch.randn(tokens, width_in, requires_grad=True)
    return record_step(model, lambda: model(x).sum().backward()).layer("")


def test_largest_multiple_of_all_three_gemms():
    assert alignment(layer(128, 256, 384)) == 128
    assert alignment(layer(32, 256, 384)) == 32
    assert alignment(layer(16, 256, 384)) == 16
    assert alignment(layer(24, 64, 64)) == 8
    assert alignment(layer(30, 64, 64)) == 1


def test_blockers_name_the_dimension():
    found = blockers(layer(30, 64, 50), 16)
    assert "wgrad K = 30 (tokens) is no multiple of 16" in found
    assert "fprop N = 50 (out) is no multiple of 16" in found
    assert blockers(layer(32, 64, 64), 16) == ()


def test_every_batch_seen_counts():
    model = nn.Linear(64, 64)

    def step():
        for rows in (64, 30):
            model(torch.randn(rows, 64)).sum().backward()

    assert alignment(record_step(model, step).layer("")) == 1
