"""Images with their channels last: the same training, the same shapes, and outputs that lie as without."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autoprec
from autoprec.applying.around.layout import channels_last
from autoprec.errors import UnsupportedError

LAST = {"implementation": {"layout": "channels_last"}}


class Net(nn.Module):
    def __init__(self, volume=False):
        super().__init__()
        conv, norm = (nn.Conv3d, nn.BatchNorm3d) if volume else (nn.Conv2d, nn.BatchNorm2d)
        self.body = nn.Sequential(conv(3, 8, 3, padding=1), norm(8), nn.ReLU(), conv(8, 8, 3, padding=1))
        self.head, self.lay = nn.Linear(8 * 4 ** (3 if volume else 2), 5), []

    def forward(self, images, mask=None):
        self.lay.append(images.is_contiguous())
        x = self.body(images)
        flat = x.view(x.size(0), -1)  # which no tensor with its channels last can give
        return {"classes": self.head(flat), "maps": x if mask is None else x * mask}


def trained(policy, volume=False):
    torch.manual_seed(0)
    model = Net(volume)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    autoprec.Policy.model_validate(policy).apply(model)
    images = torch.randn(6, 3, *((4,) * (3 if volume else 2)))
    for _ in range(3):
        out = model(images=images)
        (F.cross_entropy(out["classes"], torch.arange(6) % 5) + out["maps"].view(6, -1).square().mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, out


@pytest.mark.parametrize("volume", [False, True])
@pytest.mark.parametrize("activations", ["keep", "bf16"])
def test_training_and_outputs_are_the_same(volume, activations):
    around = {"activations": activations}
    (plain, expected), (model, out) = trained(around, volume), trained(around | LAST, volume)
    assert set(plain.lay) == {True}
    assert set(model.lay) == {False}
    for name, value in out.items():
        assert value.stride() == expected[name].stride()
        torch.testing.assert_close(value, expected[name], rtol=1e-2, atol=2e-2 if activations == "bf16" else 1e-4)
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert one.stride() == other.stride()
        assert one.grad is None
    policy = autoprec.Policy.model_validate(around | LAST)
    assert policy.audit(model).operators["implementation.layout"]["ok"]
    policy.remove(model)
    model(torch.randn(2, 3, *((4,) * (3 if volume else 2))))
    assert model.lay[-1]


def test_what_lies_so_already_and_what_is_no_image_is_handed_on():
    turned: list[int] = []
    given = ([torch.randn(2, 3), torch.randn(1, 2, 4, 4).to(memory_format=torch.channels_last)], {"a": 1})
    out = channels_last(given, turned)
    assert not turned
    assert out[0][0] is given[0][0]
    assert out[0][1] is given[0][1]
    model = nn.Sequential(nn.Linear(4, 4))
    policy = autoprec.Policy.model_validate(LAST)
    policy.apply(model)
    model(torch.randn(2, 4)).sum().backward()
    row = policy.audit(model).operators["implementation.layout"]
    assert not row["ok"]
    assert "no images" in row["reason"]


@pytest.mark.parametrize(
    ("part", "says"),
    [
        (lambda x: (x.view(2, -1).mul_(2.0), x)[1], "writes into a view"),
        (lambda x: x.as_strided((2, 4, 2, 2), (256, 64, 8, 1)), "asks for strides"),
    ],
)
def test_what_a_copy_would_lose_is_refused(part, says):
    """A view was a copy, and what a model wrote into it was lost without a word."""

    class Part(nn.Module):
        def forward(self, x):
            return part(x * 1.0)

    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), Part())
    model(torch.randn(2, 3, 8, 8))
    autoprec.Policy.model_validate(LAST).apply(model)
    with pytest.raises(UnsupportedError, match=says):
        model(torch.randn(2, 3, 8, 8))


def test_a_view_that_fails_for_another_reason_still_fails():
    class Wrong(nn.Module):
        def forward(self, x):
            return x.view(7, 7)

    model = nn.Sequential(nn.Conv2d(3, 4, 3), Wrong())
    autoprec.Policy.model_validate(LAST).apply(model)
    with pytest.raises(RuntimeError, match="invalid for input of size"):
        model(torch.randn(2, 3, 8, 8))
