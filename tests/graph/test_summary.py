"""The coverage line: shares add up, and what is not tunable has a reason."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autoprec.graph import summary
from autoprec.graph.recorder import record_step
from autoprec.graph.summary import (
    alignment,
    class_shares,
    coverage_line,
    has_fused_attention,
    remainders,
    shape_text,
)
from tests.graph.models import Decoder, Mixture, decoder_step


def test_shares_add_up():
    model = Decoder()
    report = record_step(model, lambda: decoder_step(model))
    shares = class_shares(report)
    assert sum(flops for *_, flops, _ in shares) == report.total_flops
    assert sum(calls for _, _, calls, *_ in shares) == len(report.operators)
    assert {dtypes for name, dtypes, *_ in shares if name == "gemm"} == {"fp32"}
    half = record_step(model.to(torch.bfloat16), lambda: decoder_step(model))
    assert {dtypes for name, dtypes, *_ in class_shares(half) if name == "gemm"} == {"bf16"}  # what ran, whatever may
    rest = sum(remainders(report).values())
    assert rest / report.total_flops == pytest.approx(1 - report.tunable_flops_share)
    assert "attention" in coverage_line(report)


def test_what_is_not_tunable_has_its_reason():
    model = Mixture()
    report = record_step(model, lambda: model(torch.randn(32, 32)).sum().backward())
    (router,) = [flops for why, flops in remainders(report).items() if "top-k" in why]
    assert router == report.layer("gate").total_flops
    assert "top-k" in coverage_line(report)


def test_shapes_are_those_of_the_forward():
    model = nn.Linear(4, 6)
    report = record_step(model, lambda: (model(torch.randn(3, 4)).sum() + model(torch.randn(3, 4)).sum()).backward())
    assert shape_text(report.layer("")) == "2 x 3x4x6"


def linear(width_in, width_out, *batches):
    model = nn.Linear(width_in, width_out)

    def step():
        for tokens in batches:
            model(torch.randn(tokens, width_in, requires_grad=True)).sum().backward()

    return record_step(model, step).layer("")


def test_alignment_is_the_largest_multiple_of_all_three_gemms():
    assert alignment(linear(256, 384, 128)) == 128
    assert alignment(linear(256, 384, 32)) == 32
    assert alignment(linear(256, 384, 16)) == 16
    assert alignment(linear(64, 64, 24)) == 8
    assert alignment(linear(64, 64, 30)) == 1  # tokens are the K of wgrad
    assert alignment(linear(64, 64, 64, 30)) == 1  # every batch seen counts


class Bilinear(nn.Module):
    """A product of two activations that is not attention."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.a(x) @ self.b(x).t()


def test_not_every_product_of_activations_is_called_attention():
    model = Bilinear()
    report = record_step(model, lambda: model(torch.randn(16, 8)).sum().backward())
    assert list(remainders(report)) == ["products of two activations outside attention: follow activations"]
    assert "attention's" not in coverage_line(report)
    decoder = Decoder(fused=False)
    found = record_step(decoder, lambda: decoder_step(decoder))
    (attention,) = remainders(found)
    assert attention.startswith("attention's products")


def test_products_with_another_models_weights_are_told_as_such():
    """A critic with a gradient penalty (double backward) beside the generator that the report is of."""
    generator, critic = nn.Linear(4, 8), nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))

    def step():
        made = generator(torch.randn(16, 4))
        (slope,) = torch.autograd.grad(critic(made).sum(), made, create_graph=True)
        (critic(made).mean() + ((slope.norm(dim=1) - 1) ** 2).mean()).backward()

    report = record_step(generator, step)
    # the penalty's own products, of the second backward pass, among them
    ((why, flops),) = remainders(report).items()
    assert why == "products with weights of another model, which the policy is not for"
    assert {name: flops for name, *_, flops, _ in class_shares(report) if flops > 1e4}["product"] == flops
    assert "attention" not in [name for name, *_ in class_shares(report)]
    assert flops > report.total_flops / 2


@pytest.mark.parametrize("dropout", [0.0, 0.5])  # of which torch writes attention out itself
def test_attention_that_may_be_written_out_is_torchs_own_of_few_tokens(dropout, monkeypatch):
    class Attention(nn.Linear):
        def forward(self, x, by_hand=False):
            q = k = v = super().forward(x)
            if by_hand:
                return F.dropout((q @ k.transpose(-2, -1)).softmax(-1), dropout) @ v
            return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout)

    model, x = Attention(8, 8), torch.randn(2, 1, 5, 8)
    report = record_step(model, lambda: model(x).sum().backward())
    assert has_fused_attention(report)
    assert not has_fused_attention(record_step(model, lambda: model(x, by_hand=True).sum().backward()))
    monkeypatch.setattr(summary, "MOST_SCORES", 24)
    assert not has_fused_attention(report)
