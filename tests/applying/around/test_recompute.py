"""Activation checkpointing under a policy: the second forward is the first one, bit by bit."""

import functools

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from autoprec import Policy


class Block(nn.Module):
    """Norm, attention and softmax as a user writes them."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        scores = (q @ k.transpose(-1, -2) / 5).softmax(-1)
        return x + self.out(scores @ v) + nn.functional.scaled_dot_product_attention(q, k, v)


class Model(nn.Module):
    def __init__(self, called):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.called = called

    def forward(self, x):
        for block in self.blocks:
            x = self.called(block, x)
        return x


def plainly(block, x):
    return block(x)


def gradients(called, attention, dtype):
    torch.manual_seed(0)
    model = Model(called).to(dtype)
    recipes = {"bf16": {"format": "bf16"}}
    document = {"recipes": recipes, "default": "bf16", "activations": "bf16", "operators": {"attention": attention}}
    Policy.model_validate(document).apply(model)
    x = torch.randn(4, 6, 32).to(dtype).requires_grad_()
    model(x).float().square().sum().backward()
    return [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("attention", ["keep", "fp32"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_block_has_the_gradients_of_a_plain_one(reentrant, attention, dtype):
    repeated = gradients(functools.partial(checkpoint, use_reentrant=reentrant), attention, dtype)
    for one, other in zip(repeated, gradients(plainly, attention, dtype), strict=True):
        assert torch.equal(one, other)


def test_a_model_without_a_policy_is_checkpointed_as_before():
    gradients(plainly, "keep", torch.float32)  # changes torch.utils.checkpoint, if nothing has before
    found = []
    for called in (plainly, functools.partial(checkpoint, use_reentrant=False)):
        torch.manual_seed(0)
        model = Model(called)
        model(torch.randn(4, 6, 32)).sum().backward()
        found.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_an_exception_in_the_second_forward_leaves_no_mode_behind():
    calls = []

    def once(x):
        calls.append(x)
        if len(calls) > 1:
            raise ValueError("the second forward")
        return x.softmax(-1) * x

    class Once(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x):
            return checkpoint(once, self.layer(x), use_reentrant=False)

    model = Once()
    Policy.model_validate({"recipes": {"bf16": {"format": "bf16"}}, "default": "bf16", "activations": "bf16"}).apply(
        model
    )
    with pytest.raises(ValueError, match="the second forward"):
        model(torch.randn(2, 8)).sum().backward()
    assert torch.overrides._get_current_function_mode_stack() == []
