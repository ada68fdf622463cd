"""Cross entropy in slices is that of the whole, to whomever the logits are handed out."""

import copy

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import autoprec
from autoprec.applying.around import logits as module
from autoprec.applying.around.logits import Logits
from autoprec.policy.sections import FEWEST_CLASSES

CLASSES = FEWEST_CLASSES + 7
CHUNKED = {"implementation": {"loss": "chunked"}}


def made(rows=24, dtype=torch.bfloat16, seed=0):
    draw = torch.Generator().manual_seed(seed)
    target = torch.randint(0, CLASSES, (rows,), generator=draw)
    target[::5] = 3
    return torch.randn(rows, CLASSES, generator=draw).to(dtype), target


def both(logits, loss):
    """Return (loss, gradient) of ordinary logits in float32, and of those that are handed out, and how often sliced."""
    whole, ours, said = logits.clone().requires_grad_(), logits.clone().requires_grad_(), []
    out = []
    for leaf, seen in ((whole, whole.float()), (ours, Logits.of(ours * 1, lambda: said.append(1)))):
        value = loss(seen)
        value.backward()
        out.append((value.detach(), leaf.grad))
    return *out, len(said)


def assert_close(one, other):
    torch.testing.assert_close(one[0], other[0], rtol=1e-5, atol=1e-6)
    assert one[1].dtype is other[1].dtype
    # a gradient of 16 bits may fall on the other side of a rounding
    torch.testing.assert_close(
        one[1].float(), other[1].float(), rtol=2**-7 if one[1].itemsize == 2 else 1e-5, atol=1e-7
    )


@given(
    rows=st.integers(1, 40),
    dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
    reduction=st.sampled_from(["mean", "sum", "none"]),
    smoothing=st.sampled_from([0.0, 0.1]),
    ignored=st.sampled_from([-100, 3]),
    weighted=st.booleans(),
    factor=st.sampled_from([1.0, 0.5, 1 / 3, -2.0, 0.0]),
    height=st.integers(1, 50),
)
def test_loss_and_gradient_are_those_of_the_whole(rows, dtype, reduction, smoothing, ignored, weighted, factor, height):
    logits, target = made(rows + 1, dtype)
    weight = torch.rand(CLASSES, generator=torch.Generator().manual_seed(1)) if weighted else None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_SLICE", height * CLASSES)
        whole, ours, sliced = both(
            logits,
            lambda seen: (
                factor
                * F.cross_entropy(
                    seen, target, weight, ignore_index=ignored, reduction=reduction, label_smoothing=smoothing
                )
            ).sum(),
        )
    assert sliced == 1
    assert_close(ours, whole)


@pytest.mark.parametrize(
    ("loss", "sliced"),
    [
        (lambda z, y: F.cross_entropy(z.view(2, 12, -1).view(-1, CLASSES), y), 1),
        (lambda z, y: nn.CrossEntropyLoss()(z.float().to(torch.float32), y), 1),
        (lambda z, y: F.cross_entropy(z.view(2, 12, -1)[:, :-1].reshape(-1, CLASSES), y[:22]), 1),
        (lambda z, y: F.cross_entropy(z[y != 3], y[y != 3]), 1),
        (lambda z, y: F.cross_entropy(input=z, target=y), 1),
        (lambda z, y: F.cross_entropy(z, y) + 1e-3 * z.logsumexp(-1).square().mean(), 1),
        (lambda z, y: F.nll_loss(F.log_softmax(z, -1), y), 0),
        (lambda z, y: F.cross_entropy(z / 0.7, y), 0),
        (lambda z, y: F.cross_entropy(z.div_(0.7), y), 0),
        (lambda z, y: (z.view(2, 12, -1).mul_(0.5), F.cross_entropy(z, y))[1], 0),
        (lambda z, y: (z.__setitem__((slice(None), slice(0, 9)), -1e4), F.cross_entropy(z, y))[1], 0),
        (lambda z, y: (z.detach().clamp_(max=0.5), F.cross_entropy(z, y))[1], 0),
        (lambda z, y: F.cross_entropy(z[torch.tensor([0, 0, 1])], y[:3]), 0),
        (lambda z, y: F.cross_entropy(z, F.one_hot(y, CLASSES).float()), 0),
        (lambda z, y: F.cross_entropy(z.view(2, 12, -1).transpose(1, 2), y.view(2, 12)), 0),
        (lambda z, y: F.cross_entropy(z[:, :100], y % 100), 0),
        (lambda z, y: F.cross_entropy(z, y, size_average=False), 0),
    ],
)
@pytest.mark.filterwarnings("ignore:size_average and reduce args")
def test_what_is_done_with_logits_before_their_loss(loss, sliced):
    logits, target = made()
    whole, ours, times = both(logits, lambda seen: loss(seen, target))
    assert_close(ours, whole)
    assert times == sliced


def test_logits_are_float32_to_whoever_looks():
    plain = made()[0].requires_grad_()
    seen = Logits.of(plain * 1)
    assert isinstance(seen, torch.Tensor)
    assert seen.dtype is torch.float32
    assert seen.shape == plain.shape
    assert len(seen) == 24
    assert seen.requires_grad
    assert seen.grad_fn is not None
    assert type(seen.detach()) is torch.Tensor
    assert seen.detach().dtype is torch.float32
    assert type(seen + 1) is type(torch.softmax(seen, -1)) is type(torch.cat([seen, seen])) is torch.Tensor
    assert torch.equal(seen.argmax(-1), plain.argmax(-1))
    assert seen.detach().numpy().dtype == "float32"
    assert torch.equal(copy.deepcopy(seen.detach()), plain.float())


def test_gradients_that_are_asked_for_or_watched():
    logits, target = made()
    leaf = logits.clone().requires_grad_()
    seen = Logits.of(leaf * 1)
    (gradient,) = torch.autograd.grad(F.cross_entropy(seen, target), seen, retain_graph=True)
    assert gradient.dtype is torch.float32
    assert gradient.abs().sum() > 0
    watched, found = Logits.of(leaf * 1), []
    watched.register_hook(found.append)
    F.cross_entropy(watched, target).backward()
    assert len(found) == 1


def test_a_gradient_is_differentiated_and_a_graph_kept():
    logits, target = made(dtype=torch.float32)
    out = []
    for hand_out in (lambda x: x, Logits.of):
        leaf = logits.clone().requires_grad_()
        loss = F.cross_entropy(hand_out(leaf * 1), target)
        loss.backward(retain_graph=True)
        (gradient,) = torch.autograd.grad(loss, leaf, create_graph=True)
        gradient.square().sum().backward()
        out.append(leaf.grad)
    torch.testing.assert_close(*out, rtol=1e-4, atol=1e-7)


class Net(nn.Module):
    def __init__(self, inside=False):
        super().__init__()
        self.embedding, self.head, self.inside = nn.Embedding(64, 16), nn.Linear(16, CLASSES), inside

    def forward(self, x, target=None):
        logits = self.head(self.embedding(x))
        if not self.inside:
            return {"logits": logits}
        return {"loss": F.cross_entropy(logits.float().view(-1, CLASSES), target.view(-1)), "logits": logits}


def trained(policy, inside, evaluated=False):
    torch.manual_seed(0)
    model = Net(inside)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    autoprec.Policy.model_validate(policy).apply(model)
    x, target = torch.randint(0, 64, (2, 12)), torch.randint(0, CLASSES, (2, 12))
    for _ in range(3):
        out = model(x, target)
        loss = out["loss"] if inside else F.cross_entropy(out["logits"].view(-1, CLASSES), target.view(-1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, loss.detach()


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("activations", ["keep", "bf16"])
def test_a_model_trains_alike_and_its_audit_says_so(inside, activations):
    around = {"activations": activations}
    policy = autoprec.Policy.model_validate(around | CHUNKED)
    (plain, loss), (model, ours) = trained(around, inside), trained(around | CHUNKED, inside)
    torch.testing.assert_close(ours, loss, rtol=1e-5, atol=0)
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
    rows = policy.audit(model).operators
    assert rows["implementation.loss"]["ok"], rows
    assert rows["loss"]["executed"] in ("fp32", "-")
    policy.remove(model)
    assert (
        type(model(torch.zeros(1, 2, dtype=torch.long), torch.zeros(1, 2, dtype=torch.long))["logits"]) is torch.Tensor
    )


def test_under_a_functional_transform_logits_are_ordinary():
    """``torch.func.grad`` of a loss failed where a policy computed it in slices."""
    model, x, target = Net(), torch.zeros(1, 2, dtype=torch.long), torch.zeros(2, dtype=torch.long)
    parameters = dict(model.named_parameters())

    def loss(parameters):
        logits = torch.func.functional_call(model, parameters, (x,))["logits"]
        return F.cross_entropy(logits.view(-1, CLASSES), target)

    expected = torch.func.grad(loss)(parameters)
    autoprec.Policy.model_validate(CHUNKED).apply(model)
    for name, gradient in torch.func.grad(loss)(parameters).items():
        torch.testing.assert_close(gradient, expected[name])


def test_an_audit_says_that_no_loss_was_computed_so():
    model = nn.Sequential(nn.Linear(8, 16))
    policy = autoprec.Policy.model_validate(CHUNKED)
    policy.apply(model)
    model(torch.randn(2, 8)).sum().backward()
    row = policy.audit(model).operators["implementation.loss"]
    assert not row["ok"]
    assert f"{FEWEST_CLASSES:,} classes" in row["reason"]


def test_without_gradients_logits_are_ordinary():
    model, _ = trained({"activations": "bf16"} | CHUNKED, inside=False)
    with torch.no_grad():
        logits = model(torch.zeros(1, 2, dtype=torch.long))["logits"]
    assert type(logits) is torch.Tensor
    assert logits.dtype is torch.float32
