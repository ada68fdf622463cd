"""What a policy has put on a model can be taken off and put back as it was."""

from __future__ import annotations

import torch
from torch import nn

from autoprec.applying.policy import apply_policy
from autoprec.applying.prepared import Prepared
from autoprec.policy import Policy
from tests.trial.conftest import uniform


def test_what_was_put_on_is_exchanged_without_being_built_anew() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)), torch.randn(4, 16)
    plain, before = Prepared(model), model(x)
    apply_policy(Policy.model_validate(uniform("bf16")), model)
    on, lowered, execution = Prepared(model), model(x), model[0].__dict__["_autoprec"]
    plain.put()
    assert type(model[0]) is nn.Linear
    assert torch.equal(model(x), before)
    on.put()
    assert model[0].__dict__["_autoprec"] is execution
    assert torch.equal(model(x), lowered)
    assert not torch.equal(lowered, before)
