"""Gradient errors."""

from __future__ import annotations

import torch

from autoprec.trial.inside.observe.discovery import Found
from autoprec.trial.inside.sensitivity.scan import hardly_moved


def test_layers_behind_a_projection_that_begins_at_zero_have_no_gradient_to_judge_by() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 4), torch.nn.LayerNorm(4))
    found = Found([model], [], list(model.parameters()))
    assert hardly_moved(found, [1.0, 0.1, 1.0, 0.1, 0.5, 0.5]) == []
    assert hardly_moved(found, [1e-5, 0.1, 1.0, 0.1, 0.5, 0.5]) == ["0"]
    assert hardly_moved(found, [0.0, 0.0, 0.0, 0.1, 0.5, 0.5]) == ["0", "1"]
    model[0].weight.requires_grad_(False)  # frozen: nothing of it is ever to be judged
    found = Found([model], [], [p for p in model.parameters() if p.requires_grad])
    assert hardly_moved(found, [0.1, 0.0, 0.1, 0.5, 0.5]) == ["1"]
