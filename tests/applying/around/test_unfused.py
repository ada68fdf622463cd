"""Attention as two products and a softmax: what torch's kernel returns, its gradients, and its random numbers."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autoprec
from autoprec.applying.around.unfused import may_be_unfused, unfused_attention

UNFUSED = {"implementation": {"attention": "unfused"}}
TOKENS, KEYS, WIDTH = 9, 7, 16


def given(heads=4, shared=4, keys=TOKENS, dtype=torch.float64):
    draw = torch.Generator().manual_seed(0)
    sizes = ((heads, TOKENS), (shared, keys), (shared, keys))
    return [torch.randn(2, *size, WIDTH, generator=draw, dtype=dtype).requires_grad_() for size in sizes]


def padding(keys=TOKENS):
    mask = torch.ones(2, 1, TOKENS, keys, dtype=torch.bool)
    mask[0, :, :, keys // 2 :] = False
    return mask


def without_a_key():
    mask = padding()
    mask[1, :, 3] = False
    return mask


def added(mask, value):
    return torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, value)


CALLS = {
    "plain": (given(), {}),
    "causal": (given(), {"is_causal": True}),
    "causal, fewer keys": (given(keys=KEYS), {"is_causal": True}),
    "scaled": (given(), {"scale": 0.3}),
    "shared heads": (given(shared=2), {"enable_gqa": True}),
    "padded": (given(), {"attn_mask": padding()}),
    "padded, cross": (given(keys=KEYS), {"attn_mask": padding(KEYS)}),
    "a token without a key": (given(), {"attn_mask": without_a_key()}),
    "added": (given(), {"attn_mask": added(padding(), -torch.inf)}),
    "added, a token without a key": (given(), {"attn_mask": added(without_a_key(), -torch.inf)}),
    "added, finite": (given(), {"attn_mask": added(without_a_key(), -1e9)}),
    "a learnt bias": (given(), {"attn_mask": torch.randn(TOKENS, TOKENS, dtype=torch.float64).requires_grad_()}),
    "a mask a head": (given(), {"attn_mask": added(padding().expand(2, 4, -1, -1), -1e4)}),
    "a mask of keys": (given(), {"attn_mask": torch.arange(TOKENS)[None] < KEYS}),
    "one head": ([each[:, 0].detach().requires_grad_() for each in given()], {"is_causal": True}),
}


def computed(attention, tensors, named):
    tensors = [*tensors, *(each for each in named.values() if isinstance(each, torch.Tensor) and each.requires_grad)]
    out = attention(*tensors[:3], **named)
    weights = torch.linspace(-1.0, 1.0, out.numel(), dtype=out.dtype).view_as(out)
    return out, *torch.autograd.grad((out * weights).sum(), tensors)


@pytest.mark.parametrize("call", CALLS)
def test_it_is_what_the_kernel_returns(call):
    tensors, named = CALLS[call]
    assert may_be_unfused(tuple(tensors), named)
    expected = computed(F.scaled_dot_product_attention, tensors, named)
    for one, other in zip(computed(unfused_attention, tensors, named), expected, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dropout_draws_what_torch_draws(dtype):
    """A paired trial compares losses under the same random numbers."""
    tensors = given(dtype=dtype)
    outs, states = [], []
    for attention in (F.scaled_dot_product_attention, unfused_attention):
        torch.manual_seed(3)
        outs.append(attention(*tensors, dropout_p=0.3))
        states.append(torch.random.get_rng_state())
    torch.testing.assert_close(outs[1], outs[0], rtol=2e-2, atol=2e-2 if dtype is torch.bfloat16 else 1e-5)
    assert torch.equal(*states)


def test_what_torch_refuses_or_no_product_takes_is_left_to_torch():
    q, k, v = given()
    assert not may_be_unfused((q, k, v, padding()), {"is_causal": True})
    assert not may_be_unfused((q, k, v), {"dropout_p": 1.0})
    assert not may_be_unfused((q, k), {})
    long = torch.empty(1, 2048, WIDTH, device="meta")
    assert may_be_unfused((long[:, :512], long, long), {})
    assert not may_be_unfused((long, long, long), {})  # their scores fill the memory
    assert not may_be_unfused((q, k, v, torch.ones(TOKENS)), {})
    nested = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)], layout=torch.jagged)
    assert not may_be_unfused((nested, k, v), {})
    seen = []
    torch.func.vmap(lambda q: seen.append(may_be_unfused((q, k, v), {})) or q)(q)
    assert seen == [False]


class Block(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.qkv, self.out, self.dropout, self.called = nn.Linear(32, 96), nn.Linear(32, 32), dropout, []

    def forward(self, x):
        q, k, v = (each.view(*x.shape[:2], 2, 16).transpose(1, 2) for each in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.dropout if self.training else 0.0)
        if not torch.compiler.is_compiling():
            self.called.append(y.grad_fn.name())
        return x + self.out(y.transpose(1, 2).flatten(2))


def trained(policy, model):
    torch.manual_seed(1)
    autoprec.Policy.model_validate(policy).apply(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(4):
        loss = model(torch.randn(4, 12, 32)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss.detach()


def blocks(dropout=0.0):
    torch.manual_seed(0)
    return nn.Sequential(Block(dropout), Block(dropout))


@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("attention", ["keep", "bf16"])
def test_a_model_trains_alike_and_its_audit_says_so(dropout, attention):
    around = {"activations": "bf16" if attention == "keep" else "keep", "operators": {"attention": attention}}
    plain, model = blocks(dropout), blocks(dropout)
    policy = autoprec.Policy.model_validate(around | UNFUSED)
    expected = trained(around, plain)
    torch.testing.assert_close(trained(policy, model), expected, rtol=1e-2, atol=0)
    if attention == "keep":
        assert all("ScaledDotProduct" in name for name in plain[0].called) == (not dropout)
    assert not any("ScaledDotProduct" in name for name in model[0].called)
    row = policy.audit(model).operators["implementation.attention"]
    assert (row["executed"], row["ok"]) == ("unfused", True)
    policy.remove(model)
    x = torch.randn(2, 5, 32)
    restored = blocks(dropout).eval()
    restored.load_state_dict(model.state_dict())
    assert torch.equal(model.eval()(x), restored(x))
    assert "ScaledDotProduct" in model[0].called[-1]


def test_attention_in_float32_stays_in_the_kernel_and_the_audit_says_why():
    model, policy = blocks(), autoprec.Policy.model_validate(UNFUSED)
    trained(policy, model)
    assert all("ScaledDotProduct" in name for name in model[0].called)
    row = policy.audit(model).operators["implementation.attention"]
    assert not row["ok"]
    assert "no F.scaled_dot_product_attention ran in 16 bits" in row["reason"]


@pytest.mark.parametrize("rule", ["keep", "bf16"])
def test_an_encoder_of_torch_too(rule):
    """``nn.MultiheadAttention`` calls attention where no mode sees it."""
    layers = [{"match": "*.self_attn.*", "recipe": rule}] if rule != "keep" else []
    around = {"activations": "bf16", "layers": layers, "recipes": {"bf16": {"format": "bf16"}} if layers else {}}
    losses = []
    for policy in (around, around | UNFUSED):
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.1, batch_first=True)
        model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        losses.append(trained(policy, model))
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-2, atol=0)
    made = autoprec.Policy.model_validate(policy)
    assert made.audit(model).operators["implementation.attention"]["ok"]
    made.remove(model)
    assert {type(module) for module in model.modules() if isinstance(module, nn.MultiheadAttention)} == {
        nn.MultiheadAttention
    }


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_inside_compiled_blocks_too():
    model = nn.Sequential(*(Block() for _ in range(4)))
    policy = autoprec.Policy.model_validate({"activations": "bf16", "execution": "compile"} | UNFUSED)
    x, called = torch.randn(4, 12, 32), []
    expected = model(x)

    def remember(graph, _):
        called.extend(str(node.target) for node in graph.graph.nodes)

        def run(*args):
            with torch._C.DisableTorchFunction():  # code that a compiler makes is seen by no mode
                return graph(*args)

        return run

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", partial(torch.compile, backend=remember))
        policy.apply(model)
        torch.testing.assert_close(model(x), expected, rtol=2e-2, atol=2e-2)
    assert any("matmul" in name for name in called)
    assert not any("scaled_dot_product" in name for name in called)
    row = policy.audit(model).operators["implementation.attention"]
    assert (row["executed"], row["ok"]) == ("-", True)
