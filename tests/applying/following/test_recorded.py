"""A recorded step gives the same gradients again, and changes nothing that the script holds."""

from __future__ import annotations

import torch
from torch import nn

from autoprec.applying.following.recorded import RecordedStep


def test_two_micro_batches_are_played_again_and_a_sum_of_losses_is_not() -> None:
    torch.manual_seed(0)
    model, other = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 2)), nn.Linear(2, 2)
    total = torch.zeros(())
    step = RecordedStep(model.parameters(), torch.device("cpu"), sees_backward=True)
    assert not step.complete
    step.start()
    seen = 0.0
    for _ in range(2):
        out = model(torch.randn(3, 4))
        loss = (out * 2.0).square().mean()
        total += loss.detach()
        loss.backward()
        seen += float(loss.detach())
    other(torch.randn(3, 2)).sum().backward()  # another model, in turns with this one
    step.stop()
    step.stop()
    assert step.complete
    first, before = [p.grad.clone() for p in model.parameters()], float(total)
    others = other.weight.grad.clone()
    for parameter in model.parameters():
        parameter.grad = None
    assert abs(step.play() - seen) < 1e-6
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), first, strict=True))
    assert float(total) == before
    assert torch.equal(other.weight.grad, others)
    step.forget()
    assert not step.complete
