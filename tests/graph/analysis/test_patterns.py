"""Hand-written norms, softmaxes and losses: all found, nothing else taken for one."""

from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autoprec.graph.recorder import record_step
from tests.graph.models import Decoder, HandLayerNorm, RMSNorm, decoder_step


def kinds(report):
    """Patterns by kind, each counted once by its anchor operator in the forward pass."""
    anchors = {"rms_norm": ("rsqrt",), "layer_norm": ("sqrt", "rsqrt", "std"), "l2_norm": ("sqrt", "rsqrt")}
    anchors |= {"softmax": ("exp",), "logsumexp": ("exp",), "scores": ("bmm",), "values": ("bmm",)}
    found = Counter()
    for operator in report.operators:
        if operator.phase == "forward" and operator.op.partition("::")[2] in anchors.get(operator.pattern, ()):
            found[operator.pattern] += 1
    return dict(found)


@pytest.mark.parametrize(("norm", "kind"), [(RMSNorm, "rms_norm"), (HandLayerNorm, "layer_norm")])
def test_hand_written_norms_and_softmax(norm, kind):
    model = Decoder(norm=norm, fused=False)
    report = record_step(model, lambda: decoder_step(model))
    assert kinds(report) == {kind: 5, "softmax": 2, "scores": 2, "values": 2}
    rows = [o for o in report.operators if o.pattern == kind and o.cls != "view"]
    assert {o.cls for o in rows} == {"norm"}
    assert {o.precision for o in rows} == {"fp32"}
    assert all("hand-written" in o.reason for o in rows)


def test_backward_of_a_hand_written_norm_is_a_norm():
    model = nn.Sequential(nn.Linear(8, 8), RMSNorm(8))
    report = record_step(model, lambda: model(torch.randn(2, 8)).sum().backward())
    assert {o.op for o in report.operators if o.phase == "backward" and o.cls == "norm"} >= {"aten::mul"}


def test_no_false_hits_on_a_model_of_fused_operators():
    model = Decoder()
    assert kinds(record_step(model, lambda: decoder_step(model))) == {}


@pytest.mark.parametrize(
    "function",
    [
        lambda x: (x.pow(2).mean(-1, keepdim=True) + 1).sqrt().sum(),  # a root mean square that scales nothing
        lambda x: (x[:, None] - x[None]).pow(2).sum(-1).add(1).sqrt().sum(),  # a distance
        lambda x: x.exp().sum(),
        lambda x: (x.exp() / (1 + x.square()).sum(-1, keepdim=True)).sum(),
        lambda x: torch.sigmoid(x).mean(),
    ],
)
def test_look_alikes_are_left_alone(function):
    model = nn.Linear(8, 8)
    report = record_step(model, lambda: function(model(torch.randn(4, 8))).backward())
    assert {o.pattern for o in report.operators} == {"", "output"}


@pytest.mark.parametrize(
    ("variance", "found"),
    [
        (lambda y, m: (y * y).mean(-1, keepdim=True) - m * m, True),
        (lambda y, m: y.pow(2).mean(-1, keepdim=True) - m.pow(2), True),
        (lambda y, m: (y.square().mean(-1, keepdim=True) - m.square()).abs(), True),
        (lambda y, m: torch.relu(y.square().mean(-1, keepdim=True) - m**2), True),
        (lambda y, m: ((y * y).mean(-1, keepdim=True) - m * m).clamp(min=0), True),
        (lambda y, m: (y * y).mean(-1, keepdim=True) - m, False),  # less its mean, which is no variance
        (lambda y, m: y.mean(-1, keepdim=True) - m * m, False),
    ],
)
def test_a_variance_by_difference_is_a_layer_norm_s(variance, found):
    model = nn.Linear(8, 8)

    def step():
        y = model(torch.randn(4, 8))
        mean = y.mean(-1, keepdim=True)
        ((y - mean) / (variance(y, mean) + 9.0).sqrt()).sum().backward()

    assert kinds(record_step(model, step)) == ({"layer_norm": 1} if found else {})


def test_l2_norm_by_hand():
    model = nn.Linear(8, 8)

    def step():
        y = model(torch.randn(4, 8))
        (y / y.square().sum(-1, keepdim=True).sqrt()).sum().backward()

    assert kinds(record_step(model, step)) == {"l2_norm": 1}


def test_softmax_without_maximum_and_logsumexp():
    model = nn.Linear(8, 8)

    def step():
        y = model(torch.randn(4, 8))
        e = torch.exp(y)
        (e / e.sum(-1, keepdim=True)).square().sum().backward(retain_graph=True)
        y.exp().sum(-1).log().sum().backward()

    assert kinds(record_step(model, step)) == {"softmax": 1, "logsumexp": 1}


def once_more(y):
    return (y - y.amax(-1, keepdim=True)).exp()


@pytest.mark.parametrize(
    ("use", "exponentials"),
    [
        (lambda y: y.exp() / y.exp().sum(-1, keepdim=True), 2),
        (lambda y: y.exp() / torch.exp(y).sum(-1)[:, None], 2),
        (lambda y: (1 / y.exp().sum(-1, keepdim=True)) * y.exp(), 2),
        (lambda y: once_more(y) / once_more(y).sum(-1, keepdim=True), 2),
        (lambda y: (y - y.max()).exp() / (y - y.max()).exp().sum(-1, keepdim=True), 2),
        (lambda y: (y / 2).exp() / (y / 2).exp().sum(-1, keepdim=True), 2),
        (lambda y: torch.exp(y.clamp(max=9.0)) / (torch.exp(y.clamp(max=9.0)).sum(-1, keepdim=True) + 1e-6), 2),
        (lambda y: (y / 2).exp() / (y / 3).exp().sum(-1, keepdim=True), 0),
        (lambda y: (y + 1).exp() / (y - 1).exp().sum(-1, keepdim=True), 0),
        (lambda y: y.exp() / (y + 1).exp().sum(-1, keepdim=True), 0),
        (lambda y: y.sin() / y.exp().sum(-1, keepdim=True), 0),
        (lambda y: F.dropout(y, 0.5).exp() / F.dropout(y, 0.5).exp().sum(-1, keepdim=True), 0),
    ],
)
def test_an_exponential_that_is_written_twice_is_a_softmax(use, exponentials):
    model = nn.Linear(8, 8)
    report = record_step(model, lambda: use(model(torch.randn(4, 8))).square().sum().backward())
    assert kinds(report) == ({"softmax": exponentials} if exponentials else {})


@pytest.mark.parametrize("fused", [True, False])
def test_cross_entropy_by_hand(fused):
    model = nn.Linear(8, 5)
    target = torch.tensor([1, 2, 3])

    def step():
        y = model(torch.randn(3, 8))
        logp = F.log_softmax(y, -1) if fused else y - y.exp().sum(-1, keepdim=True).log()
        (-logp.gather(-1, target[:, None])).mean().backward()

    report = record_step(model, step)
    rows = [o for o in report.operators if o.pattern == "cross_entropy" and o.phase == "forward"]
    assert {o.op.partition("::")[2] for o in rows} >= {"gather", "mean"}
    assert {o.cls for o in rows if o.cls != "view"} == {"loss"}


def by_hand(y):
    e = (y - y.amax(-1, keepdim=True)).exp()
    return e / e.sum(-1, keepdim=True)


@pytest.mark.parametrize("softmax", [by_hand, lambda y: y.softmax(-1)])
@pytest.mark.parametrize("log_first", [True, False])
def test_logarithms_of_a_softmax_are_a_cross_entropy(softmax, log_first):
    model = nn.Linear(8, 5)
    target = torch.tensor([[1], [2], [3]])

    def step():
        p = softmax(model(torch.randn(3, 8)))
        picked = p.log().gather(-1, target) if log_first else p.gather(-1, target).log()
        (-picked).mean().backward()

    rows = [o for o in record_step(model, step).operators if o.pattern == "cross_entropy" and o.phase == "forward"]
    assert {o.op.partition("::")[2] for o in rows} >= {"gather", "log", "neg", "mean"}
    assert {o.cls for o in rows if o.cls != "view"} == {"loss"}


def test_picked_probabilities_without_a_logarithm_are_not_a_cross_entropy():
    model = nn.Linear(8, 5)

    def step():
        p = by_hand(model(torch.randn(3, 8)))
        p.gather(-1, torch.tensor([[1], [2], [3]])).mean().backward()

    assert "cross_entropy" not in {o.pattern for o in record_step(model, step).operators}
