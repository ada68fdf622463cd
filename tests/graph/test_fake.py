"""Fake recording counts what real recording counts, without the memory."""

import pytest
import torch
from torch import nn

from autoprec.graph.fake import record_fake
from autoprec.graph.recorder import record_step
from tests.graph.models import Decoder, HandLayerNorm, Mixture, decoder_step


@pytest.mark.parametrize("options", [{}, {"fused": False, "norm": HandLayerNorm}, {"reentrant": False}, {"tied": True}])
def test_same_layers_and_flops_as_a_real_step(options):
    model = Decoder(**options)
    real = record_step(model, lambda: decoder_step(model))
    fake = record_fake(lambda: Decoder(**options), decoder_step)
    assert fake.source == "fake"
    assert fake.total_flops == real.total_flops
    assert fake.layers == real.layers
    assert fake.groups == real.groups
    for name in ("parameters", "gradients"):
        assert fake.memory[name] == real.memory[name]


def test_a_model_far_larger_than_memory():
    width = 1 << 17  # 64 GiB of weights in float32

    def step(model):
        model(torch.randn(1, 4, width)).sum().backward()

    report = record_fake(lambda: nn.Linear(width, width, bias=False), step)
    assert report.memory["parameters"] == 4 * width**2
    assert report.total_flops == 2 * 2 * 4 * width**2


def test_data_dependent_choices_are_guessed_and_counted():
    report = record_fake(Mixture, lambda m: m(torch.randn(64, 32)).sum().backward())
    assert any("guessed" in note for note in report.notes)
    assert report.layer("head").flops["fprop"] == 2 * 64 * 32 * 48


def test_branches_on_data_are_guessed():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
            self.rate = float(torch.linspace(0, 1, 3)[1])

        def forward(self, x):
            y = self.a(x)
            return y if y.mean() > 0 else self.b(y)

    report = record_fake(Net, lambda m: m(torch.randn(2, 8)).sum().backward())
    assert report.layer("a").flops
    assert "never_called" in report.layer("b").flags
