"""GELU by hand is found by what it computes, and runs in torch's kernel."""

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autoprec
from autoprec.applying.around.gelu import gelus_by_hand
from autoprec.graph.recorder import record_step
from autoprec.graph.report import GraphReport

FUSED = {"implementation": {"gelu": "fused"}}


class NewGELUActivation(nn.Module):
    def forward(self, x):
        return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


class ErfGelu(nn.Module):
    def forward(self, x):
        return x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0)))


class QuickGELU(nn.Module):
    def forward(self, x):
        return x * torch.sigmoid(1.702 * x)


class AlreadyGelu(nn.Module):
    def forward(self, x):
        return F.gelu(x, approximate="tanh")


class GatedGelu(nn.Module):
    def forward(self, x, gate):
        return NewGELUActivation.forward(self, gate) * x


class LearntGelu(NewGELUActivation):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))


class Activation(NewGELUActivation):
    """The same, under a name that says nothing."""


@pytest.mark.parametrize(
    ("kind", "form"),
    [
        (NewGELUActivation, "tanh"),
        (ErfGelu, "none"),
        *((other, None) for other in (QuickGELU, AlreadyGelu, GatedGelu, LearntGelu, Activation, nn.GELU)),
    ],
)
def test_it_is_known_by_what_it_computes(kind, form):
    model = nn.Sequential(nn.Linear(4, 4), kind())
    before = torch.random.get_rng_state()
    found = gelus_by_hand(model)
    assert [one for _, one in found.values()] == [form] * (form is not None)
    assert torch.equal(torch.random.get_rng_state(), before)


def model_of(kind=NewGELUActivation):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), kind(), nn.Linear(32, 4))


@pytest.mark.parametrize("kind", [NewGELUActivation, ErfGelu])
@pytest.mark.parametrize("activations", ["keep", "bf16"])
def test_a_model_trains_alike_and_its_audit_says_so(kind, activations):
    around, losses = {"activations": activations}, []
    for policy in (around, around | FUSED):
        model = model_of(kind)
        made = autoprec.Policy.model_validate(policy)
        made.apply(model)
        optimizer, draw = torch.optim.SGD(model.parameters(), lr=0.1), torch.Generator().manual_seed(1)
        for _ in range(4):
            loss = model(torch.randn(16, 8, generator=draw)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.detach())
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-2 if activations == "bf16" else 1e-5, atol=0)
    assert made.audit(model).operators["implementation.gelu"]["ok"]
    made.remove(model)
    assert type(model[1]) is kind
    plain, x = model_of(kind), torch.randn(4, 8)
    plain.load_state_dict(model.state_dict())
    assert torch.equal(model(x), plain(x))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_inside_compiled_blocks_too():
    """A trial whose blocks were compiled was refused: nothing had been written down."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), NewGELUActivation()) for _ in range(4)))
    policy, x = autoprec.Policy.model_validate(FUSED | {"execution": "compile"}), torch.randn(4, 8)
    expected = model(x)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
        policy.apply(model)
        torch.testing.assert_close(model(x), expected)
    assert policy.audit(model).operators["implementation.gelu"]["ok"]


def test_an_audit_says_that_there_is_none():
    model, policy = model_of(nn.GELU), autoprec.Policy.model_validate(FUSED)
    policy.apply(model)
    model(torch.randn(4, 8)).sum().backward()
    row = policy.audit(model).operators["implementation.gelu"]
    assert not row["ok"]
    assert "no module" in row["reason"]


def test_a_recorded_step_names_them():
    model = model_of()
    report = record_step(model, lambda: model(torch.randn(2, 8)).sum().backward())
    assert report.gelus_by_hand == ("1",)
    assert GraphReport.from_json(report.to_json()).gelus_by_hand == ("1",)
