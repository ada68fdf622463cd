"""The joint graph of functorch counts the same FLOPs, layer by layer."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autoprec.errors import UnsupportedError
from autoprec.graph.recorder import record_step
from tests.graph.joint import cross_check
from tests.graph.models import Decoder, token_batch


@pytest.mark.slow
def test_recorded_and_joint_graph_agree():
    torch.manual_seed(0)
    model = Decoder(layers=1)
    ids, targets = token_batch()

    def loss(out):
        return F.cross_entropy(out.flatten(0, 1), targets)

    report = record_step(model, lambda: loss(model(ids)).backward())
    assert cross_check(report, model, (ids,), {}, loss) == ()
    first = report.layers[0]
    wrong = replace(report, layers=(replace(first, flops={**first.flops, "wgrad": 1}), *report.layers[1:]))
    (line,) = cross_check(wrong, model, (ids,), {}, loss)
    assert line.startswith("blocks.0.attn.q_proj")


def test_a_step_that_cannot_be_captured_says_why():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(4, 4)

        def forward(self, x):
            return self.a(x) if self.a(x).mean().item() > 0 else x

    model, x = Net(), torch.randn(2, 4)
    report = record_step(model, lambda: (model(x).sum() + model.a(x).sum()).backward())
    with pytest.raises(UnsupportedError, match="joint graph"):
        cross_check(report, model, (x,), {}, torch.sum)
