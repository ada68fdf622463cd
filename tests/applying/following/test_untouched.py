"""Whatever happens inside, the model, its gradients and the random streams are as before."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import nn

from autoprec.applying.following.untouched import untouched


def test_all_is_put_back_also_after_an_error() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    model(torch.randn(8, 4)).sum().backward()
    model.seen = 0
    gradient, value = model[0].weight.grad, model[0].weight.grad.clone()
    mean = model[1].running_mean.clone()
    streams = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()

    def body() -> None:
        with untouched(model, list(model.parameters()), torch.device("cpu")):
            gradient.zero_()
            model[0].weight.grad = None
            model[0].__class__ = nn.Identity
            model.seen, model.more = 1, 2
            model[1](torch.randn(8, 4))
            model[1].extra = random.random() + np.random.rand()
            raise RuntimeError

    with pytest.raises(RuntimeError):
        body()
    assert type(model[0]) is nn.Linear
    assert model.seen == 0
    assert not hasattr(model, "more")
    assert not hasattr(model[1], "extra")
    assert model[0].weight.grad is gradient
    assert torch.equal(gradient, value)
    assert torch.equal(model[1].running_mean, mean)
    assert torch.equal(torch.get_rng_state(), streams[0])
    assert random.getstate() == streams[1]
    assert np.random.get_state()[1].tolist() == streams[2]
