"""``nn.MultiheadAttention``: the same numbers as torch's, with projections under a policy."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from autoprec import Policy
from autoprec.applying.policy import remove_policy
from autoprec.applying.units import tunable_units
from autoprec.errors import UnsupportedError
from autoprec.precision.recipes import BUILTIN_RECIPES


class Holder(nn.Module):
    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.attention = attention

    def forward(self, *args, **kwargs):
        return self.attention(*args, **kwargs)


def policy(name: str) -> Policy:
    return Policy.model_validate({"recipes": {name: BUILTIN_RECIPES[name]}, "default": name})


PADDING = torch.tensor([[False] * 4 + [True]] * 3)
CAUSAL = torch.ones(5, 5, dtype=torch.bool).triu(1)
CALLS = {
    "plain": {},
    "no weights": {"need_weights": False},
    "padding": {"key_padding_mask": PADDING},
    "causal": {"attn_mask": CAUSAL, "is_causal": True, "need_weights": False},
    "both masks": {"attn_mask": CAUSAL, "key_padding_mask": PADDING},
    "float mask": {"attn_mask": torch.randn(12, 5, 5)},
    "each head": {"average_attn_weights": False},
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("cross", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
def test_it_computes_what_torch_computes(call: str, cross: bool, batch_first: bool) -> None:
    torch.manual_seed(0)
    theirs = nn.MultiheadAttention(16, 4, batch_first=batch_first)
    ours = Holder(copy.deepcopy(theirs))
    policy("fp32").apply(ours)
    q, kv = torch.randn(3, 5, 16), torch.randn(3, 5, 16)
    if not batch_first:
        q, kv = q.transpose(0, 1), kv.transpose(0, 1)
    streams = (q, kv, kv) if cross else (q, q, q)
    expected, weights = theirs(*streams, **CALLS[call])
    found, found_weights = ours(*streams, **CALLS[call])
    assert torch.allclose(expected, found, atol=1e-5)
    assert (weights is None) == (found_weights is None)
    assert weights is None or torch.allclose(weights, found_weights, atol=1e-6)


def test_unbatched_and_separate_projections() -> None:
    torch.manual_seed(0)
    theirs = nn.MultiheadAttention(16, 4, kdim=8, vdim=12)
    ours = Holder(copy.deepcopy(theirs))
    policy("fp32").apply(ours)
    args = torch.randn(5, 16), torch.randn(6, 8), torch.randn(6, 12)
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(theirs(*args), ours(*args), strict=True))


@pytest.mark.parametrize("name", ["bf16", "fp8_rowwise"])
def test_projections_are_tuned_audited_and_restored(name: str) -> None:
    torch.manual_seed(0)
    model = Holder(nn.MultiheadAttention(16, 4, batch_first=True))
    assert list(tunable_units(model)) == ["attention.in_proj_weight", "attention.out_proj"]
    x = torch.randn(3, 5, 16)
    before = model(x, x, x)[0]
    chosen = policy(name)
    chosen.apply(model)
    model(x, x, x)[0].sum().backward()
    report = chosen.audit(model)
    # its input needs no gradient, so the first projection has no dgrad
    assert report.ok, report.to_json()
    assert report.layers[1].executed == report.layers[1].requested
    assert model.attention.in_proj_weight.grad is not None
    remove_policy(model)
    assert type(model.attention) is nn.MultiheadAttention
    assert torch.equal(model(x, x, x)[0], before)


def test_what_cannot_be_expressed_is_refused() -> None:
    model = Holder(nn.MultiheadAttention(16, 4, add_bias_kv=True))
    with pytest.raises(UnsupportedError, match="add_bias_kv"):
        policy("bf16").apply(model)


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("norm_first", [False, True])
def test_dropout_falls_on_the_same_elements_as_in_the_script(batch_first: bool, norm_first: bool) -> None:
    """A dropout draws its mask in the order of memory, so outputs must lie in it as PyTorch's do."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.3, batch_first=batch_first, norm_first=norm_first)
    theirs = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    ours = copy.deepcopy(theirs)
    policy("fp32").apply(ours)
    x = torch.randn(3, 5, 16)
    found = []
    for model in (theirs, ours):
        torch.manual_seed(1)
        out = model(x)
        out.square().mean().backward()
        found.append((out, [p.grad for p in model.parameters()]))
    (expected, gradients), (out, own) = found
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(own, gradients, atol=1e-5, rtol=1e-4)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(
    ("recipe", "padding"),
    [("bf16", None), ("bf16", PADDING), ("int8", None), ("int8", PADDING), ("fp8_delayed", None)],
)
def test_torchs_encoder_runs_the_policy_in_evaluation(recipe: str, padding: torch.Tensor | None) -> None:
    """One kernel for a whole layer would run it as written; where it pads, it leaves zeros, as torch does."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
    model, x = nn.TransformerEncoder(layer, 2), torch.randn(3, 5, 16)
    kept = slice(None) if padding is None else ~padding

    def evaluated(one: nn.Module) -> torch.Tensor:
        with torch.no_grad():
            return one.eval()(x, src_key_padding_mask=padding)

    as_written = evaluated(model)
    chosen = policy(recipe)
    chosen.apply(model)
    with_gradients, found = model(x, src_key_padding_mask=padding).detach(), evaluated(model)
    assert torch.equal(found[kept], with_gradients[kept])
    assert not torch.allclose(found[kept], as_written[kept], atol=1e-4)
    assert torch.equal(evaluated(copy.deepcopy(model)), found)
    assert padding is None or torch.equal(found[padding], torch.zeros_like(found[padding]))
    assert "precision=()" not in str(model)
    remove_policy(model)
    assert type(model.layers[0]) is nn.TransformerEncoderLayer
    assert torch.equal(evaluated(model), as_written)


@pytest.mark.parametrize("batch_first", [False, True])
def test_outputs_lie_in_memory_as_those_of_torch(batch_first: bool) -> None:
    theirs = nn.MultiheadAttention(16, 4, batch_first=batch_first)
    ours = Holder(copy.deepcopy(theirs))
    policy("fp32").apply(ours)
    for shape in ((3, 5, 16), (5, 16)):
        x = torch.randn(*shape)
        for need_weights in (False, True):
            expected, found = (model(x, x, x, need_weights=need_weights)[0] for model in (theirs, ours))
            assert (found.shape, found.stride()) == (expected.shape, expected.stride())
