"""A Session without AutoPrec around it just trains."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from autoprec import Policy
from autoprec.errors import UsageError
from autoprec.trial import session as sessions
from autoprec.trial.inside.reporting.reports import Reports
from autoprec.trial.session import Session, register, report
from tests.trial.conftest import uniform


def test_session_trains_and_applies_a_policy() -> None:
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


@pytest.mark.parametrize("own_optimizer", [True, False])
def test_a_session_carries_out_phases(own_optimizer: bool) -> None:
    from autoprec.applying.phases import phases_of
    from autoprec.policy import policy_from_dict

    document = uniform("bf16") | {"phases": [{"from": 0.5, "default": "keep", "layers": []}]}
    policy = policy_from_dict(document, cls=Policy)
    model = nn.Sequential(nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1) if own_optimizer else None
    with pytest.raises(UsageError, match="how many steps"):
        Session(model, optimizer, policy)
    session = Session(model, optimizer, policy, run_steps=4)
    ran = []
    for _ in range(4):
        loss = model(torch.randn(2, 4)).square().mean()
        session.step(loss) if own_optimizer else session.observe(loss)
        ran.append(type(model[0]) is nn.Linear)
    assert ran == [False, True, True, True]
    found = phases_of(model)
    assert found is not None
    assert found.step == 4
    policy.remove(model)


@pytest.mark.parametrize("mode", [None, "run"])
def test_outside_a_trial_a_report_does_nothing(mode: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    agent: Any = None if mode is None else SimpleNamespace(mode=mode)
    monkeypatch.setattr(sessions, "_agent", lambda: agent)
    report(eval_loss="not a number")


@pytest.mark.parametrize("mode", ["host", "trial"])
def test_in_a_trial_it_reaches_what_collects_reports(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    agent: Any = SimpleNamespace(mode=mode, reports=Reports())
    monkeypatch.setattr(sessions, "_agent", lambda: agent)
    report(eval_loss=1.0, **{"val/f1": torch.tensor(0.5)})
    assert list(agent.reports._names) == ["eval_loss", "val/f1"]
    with pytest.raises(UsageError, match="takes a number, not a str"):
        report(eval_loss="1.0")


def test_a_model_is_named_once_and_a_copy_that_generates_only_where_it_is_one() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    assert register(policy=model) is model
    for none_or_two in ({}, {"model": model, "policy": model}):
        with pytest.raises(UsageError, match="takes one model"):
            register(**none_or_two)
    with pytest.raises(UsageError, match="one side only"):
        register(policy=model, rollout=model)
