"""A Session without AutoPrec around it just trains."""

from __future__ import annotations

import torch
from torch import nn

from autoprec.trial.session import Session, register
from tests.trial.conftest import uniform


def test_session_trains_and_applies_a_policy() -> None:
    from autoprec.applying.policy import Policy
    from autoprec.policy import policy_from_dict

    torch.manual_seed(0)
    model, other = nn.Sequential(nn.Linear(4, 4)), nn.Sequential(nn.Linear(4, 4))
    other.load_state_dict(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert register(model, optimizer) is model
    session = Session(model, optimizer, policy_from_dict(uniform("bf16"), cls=Policy))
    x = torch.randn(8, 4)
    first = model(x)
    assert not torch.equal(first, other(x))  # in bf16
    session.step(first.square().mean())
    assert model[0].weight.grad is None
    assert not torch.equal(model[0].weight, other[0].weight)
    session.observe(torch.tensor(1.0))
