"""What a process becomes, and that nothing of it begins before its step."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from autoprec.trial.inside.agent import Agent


def test_a_run_without_a_policy_installs_nothing() -> None:
    agent = Agent({"mode": "run", "policy": None})
    call = nn.Module.__call__
    agent.install()
    assert nn.Module.__call__ is call


def test_a_trial_at_a_later_step_begins_there_also_where_the_script_names_its_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = Agent({"mode": "trial", "at_step": 3, "result": str(tmp_path / "result.json")})
    model, begun = nn.Linear(2, 2), list[int]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monkeypatch.setattr(agent, "_become", lambda *_: (begun.append(len(taken)), agent.hooks.unwatch()))
    agent.register(model, [optimizer])
    taken = list[torch.Tensor]()
    while len(taken) < 5:
        agent.boundary(model)
        loss = model(torch.ones(1, 2)).sum()
        events = agent.hooks.events
        events.before_backward((loss,))
        events.after_backward((loss,))
        events.gradients_ready(optimizer)
        events.after_step(optimizer)
        taken.append(loss)
    assert begun == [3]
