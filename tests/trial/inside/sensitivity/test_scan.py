"""Gradient errors."""

from __future__ import annotations

import pytest
import torch

from autoprec.trial.inside.observe.discovery import Found
from autoprec.trial.inside.observe.hooks import Hooks
from autoprec.trial.inside.sensitivity.scan import _Watch, hardly_moved


@pytest.mark.parametrize("unscaled", [False, True], ids=["at its step", "before"])
def test_gradients_of_two_optimizers_under_one_scaler_are_in_one_unit(unscaled: bool) -> None:
    """Those of the second were as the scaled loss left them, 65536 times larger: nothing else was seen."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 4))
    hooks = Hooks()
    hooks.install()
    try:
        first, second = (torch.optim.SGD(layer.parameters(), lr=0.0) for layer in model)
        scaler, seen = torch.amp.GradScaler("cpu", init_scale=2.0**16), []
        found = Found([model], [first, second], list(model.parameters()))
        hooks.events = _Watch(
            found, hooks, lambda watch: seen.append([watch.unclip.get(id(p), 1.0) for p in model[1].parameters()])
        )
        scaler.scale(model(torch.ones(2, 4)).sum()).backward()
        if unscaled:
            scaler.unscale_(second)
        scaler.step(first)
        scaler.step(second)
    finally:
        hooks.remove()
    assert seen == [[1.0 if unscaled else 2.0**-16] * 2]


def test_layers_behind_a_projection_that_begins_at_zero_have_no_gradient_to_judge_by() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 4), torch.nn.LayerNorm(4))
    found = Found([model], [], list(model.parameters()))
    assert hardly_moved(found, [1.0, 0.1, 1.0, 0.1, 0.5, 0.5]) == []
    assert hardly_moved(found, [1e-5, 0.1, 1.0, 0.1, 0.5, 0.5]) == ["0"]
    assert hardly_moved(found, [0.0, 0.0, 0.0, 0.1, 0.5, 0.5]) == ["0", "1"]
    model[0].weight.requires_grad_(False)  # frozen: nothing of it is ever to be judged
    found = Found([model], [], [p for p in model.parameters() if p.requires_grad])
    assert hardly_moved(found, [0.1, 0.0, 0.1, 0.5, 0.5]) == ["1"]
