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


# ---------------------------------------------------------------- delayed scales
DELAYED = {
    "recipes": {"d": {"format": "fp8", "scaling": {"scale": "delayed", "amax_compute_algo": "most_recent"}}},
    "default": "d",
}


class Shared(nn.Module):
    """A block that is called ``depth`` times, each time by ``called``."""

    def __init__(self, called, depth=4):
        super().__init__()
        self.up, self.down, self.called, self.depth = nn.Linear(32, 32), nn.Linear(32, 32), called, depth

    def block(self, x):
        return x + 2 * self.down(torch.relu(self.up(x)))

    def forward(self, x):
        for _ in range(self.depth):
            x = self.called(self.block, x)
        return x


def batch(step, part=0):
    generator = torch.Generator().manual_seed(10 * step + part)
    return (torch.randn(16, 32, generator=generator) * 2.0 ** (step + part)).requires_grad_()


def shared_depth(model, step):
    model(batch(step)).square().mean().backward()


def in_flight(model, step):
    """Two micro-batches, first in, first out."""
    for loss in [model(batch(step, part)).square().mean() for part in range(2)]:
        loss.backward()


def siamese(model, step):
    (model(batch(step, 0)) - model(batch(step, 1))).square().mean().backward()


def evaluated_between(model, step):
    out = model(batch(step))
    with torch.no_grad():
        model(100 * batch(step))
    model.eval()
    model(50 * batch(step))
    model.train()
    out.square().mean().backward()


def given_up(model, step):
    """A forward in training mode whose backward never comes."""
    model(batch(step, 1)).square().mean()
    model(batch(step)).square().mean().backward()


def stepped_between(model, step):
    """The scales move on before the backward pass of the first loss: another optimizer has stepped."""
    first = model(batch(step, 0)).square().mean()
    model(batch(step, 3)).square().mean().backward()
    torch.optim.SGD(model.parameters(), 0.0).step()
    first.backward()


def twice(model, step):
    loss = model(batch(step)).square().mean()
    loss.backward(retain_graph=True)
    loss.backward()


def nested(block, x, reentrant):
    def outer(x):
        return checkpoint(block, checkpoint(block, x, use_reentrant=reentrant), use_reentrant=reentrant)

    return checkpoint(outer, x, use_reentrant=reentrant)


HOW = {
    "plain": lambda block, x: block(x),
    "non-reentrant": functools.partial(checkpoint, use_reentrant=False),
    "reentrant": functools.partial(checkpoint, use_reentrant=True),
    "whole": functools.partial(checkpoint, use_reentrant=False, early_stop=False),
    "nested plain": lambda block, x: block(block(x)),
    "nested non-reentrant": functools.partial(nested, reentrant=False),
    "nested reentrant": functools.partial(nested, reentrant=True),
}


def delayed_run(how, loop):
    """Return gradients of four steps, and what the policy remembers."""
    torch.manual_seed(0)
    model = Shared(HOW[how])
    policy = Policy.model_validate(DELAYED)
    policy.apply(model)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    found = []
    for step in range(4):
        loop(model, step)
        found.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
        optimizer.step()
        optimizer.zero_grad()
    return found, policy.state_dict(model)


@pytest.mark.filterwarnings("ignore:None of the inputs")  # of a reentrant part in another one
@pytest.mark.parametrize("how", [name for name in HOW if "plain" not in name])
@pytest.mark.parametrize(
    "loop", [shared_depth, in_flight, siamese, evaluated_between, given_up, stepped_between, twice]
)
def test_each_repeated_forward_has_the_delayed_scales_of_its_own(how, loop):
    plain, expected = delayed_run("nested plain" if how.startswith("nested") else "plain", loop)
    found, state = delayed_run(how, loop)
    for one, other in zip(found, plain, strict=True):
        # reentrant parts add up the gradients of several calls in another order
        same_order = how in ("non-reentrant", "whole", "nested non-reentrant")
        assert torch.equal(one, other) if same_order else (one - other).norm() <= 1e-6 * other.norm()
    for name, value in expected.items():
        assert torch.allclose(state[name], value, rtol=1e-5), name


def test_a_script_s_own_recomputation_takes_the_scales_of_the_step():
    """Libraries repeat forwards by autograd functions of their own, too: within a step the scale is the same."""

    class Again(torch.autograd.Function):
        @staticmethod
        def forward(ctx, block, x):
            ctx.block, ctx.x = block, x.detach().requires_grad_()
            return block(x)

        @staticmethod
        def backward(ctx, grad):
            with torch.enable_grad():
                out = ctx.block(ctx.x)
            out.backward(grad)
            return None, ctx.x.grad

    HOW["own"] = Again.apply
    (plain, expected), (found, state) = delayed_run("plain", siamese), delayed_run("own", siamese)
    assert all(torch.equal(one, other) for one, other in zip(found, plain, strict=True))
    assert all(torch.equal(state[name], expected[name]) for name in expected)
