"""What a process becomes, and that nothing of it begins before its step."""

from __future__ import annotations

from torch import nn

from autoprec.trial.inside.agent import Agent


def test_a_run_without_a_policy_installs_nothing() -> None:
    agent = Agent({"mode": "run", "policy": None})
    call = nn.Module.__call__
    agent.install()
    assert nn.Module.__call__ is call
