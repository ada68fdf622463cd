"""The emulated backend runs every recipe at every size, and says that it is not hardware."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoprec.backends import choose
from autoprec.backends.emulated import EmulatedBackend, fp8_attention
from autoprec.policy import LayerPlan
from autoprec.precision.recipes import BUILTIN_RECIPES


@pytest.mark.parametrize("name", BUILTIN_RECIPES)
def test_odd_sizes_run_and_are_close_to_float32(name: str) -> None:
    backend, recipe, module = EmulatedBackend(), BUILTIN_RECIPES[name], nn.Linear(37, 19)
    found = backend.capability(recipe, gemm="fprop", m=5, k=37, n=19, device="cpu")
    assert found
    assert ("no 8-bit speed" in found.reason) == (recipe.format != "int8")
    plan = LayerPlan.uniform(recipe)
    run = backend.bind(plan, module, name="x", seed=3)
    x = torch.randn(5, 37, requires_grad=True)
    out = run(x, module.weight, module.bias)
    out.sum().backward()
    wanted = module(x).detach()
    assert (out - wanted).norm() <= 0.3 * wanted.norm()
    asked = zip(("fprop", "dgrad", "wgrad"), plan.recipes, strict=True)
    assert run.executed == {gemm: one.describe() for gemm, one in asked if one is not None}
    assert (run.backend, run.quantizers.seed) == ("emulated", 3)


def test_it_runs_anywhere() -> None:
    assert all(EmulatedBackend().available(device) for device in ("cpu", "cuda:0", "mps"))


def test_by_name_it_emulates_casts_and_as_the_choice_of_auto_it_does_not() -> None:
    plan, module = LayerPlan.uniform(BUILTIN_RECIPES["bf16"]), nn.Linear(2, 2)
    asked, chosen = (choose(name, "cpu").bind(plan, module, name="x", seed=0) for name in ("emulated", "auto"))
    assert (asked.emulates_casts, chosen.emulates_casts) == (True, False)


# --- attention --------------------------------------------------------------------------------------------------------

SCALE = 1 / math.sqrt(32)


def operands(groups: int = 4, keys: int = 48) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = ((2, 4, 48, 32), (2, groups, keys, 32), (2, groups, keys, 32))
    return [torch.randn(shape).bfloat16() for shape in shapes]


def rounded(x: Tensor, dtype: torch.dtype, amax: Tensor | None = None) -> Tensor:
    """Round through torch's own cast, under one scale."""
    scale = torch.finfo(dtype).max / (x.abs().amax() if amax is None else amax)
    return (x * scale).to(dtype).float() / scale


def by_hand(query: Tensor, key: Tensor, value: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
    """Write both passes of causal attention out, one rounding after another; the result, dQ, dK and dV."""
    e4, e5 = torch.float8_e4m3fn, torch.float8_e5m2
    amax = torch.stack([query, key, value]).abs().amax().float()
    q, k, v = (rounded(x.float(), e4, amax) for x in (query, key, value))
    scores = (q @ k.mT * SCALE).masked_fill(torch.ones(48, 48, dtype=torch.bool).triu(1), -math.inf)
    exact = scores.softmax(-1)
    weights, grad = rounded(exact, e4), rounded(grad, e5)
    d_weights = grad @ v.mT
    d_scores = rounded(exact * (d_weights - (exact * d_weights).sum(-1, keepdim=True)), e5)
    parts = d_scores @ k * SCALE, d_scores.mT @ q * SCALE, weights.mT @ grad
    most = torch.stack(parts).abs().amax()
    return rounded(weights @ v, e4), *(rounded(part, e5, most) for part in parts)


def test_both_passes_round_what_the_kernel_rounds() -> None:
    leaves = [x.float().requires_grad_() for x in operands()]
    out = fp8_attention(*leaves, causal=True, scale=SCALE)
    grad = torch.randn_like(out)
    out.backward(grad)
    found = (out.detach(), *(leaf.grad for leaf in leaves))
    for ours, theirs in zip(found, by_hand(*operands(), grad), strict=True):
        assert ours is not None
        # sums in another order flip a few codes
        assert (ours - theirs).norm() < 0.01 * theirs.norm()


def test_attention_is_near_exact_and_not_it() -> None:
    query, key, value = operands()
    exact = F.scaled_dot_product_attention(query.float(), key.float(), value.float(), is_causal=True)
    error = (fp8_attention(query, key, value, causal=True, scale=SCALE) - exact).norm() / exact.norm()
    assert 0.02 < error < 0.08


def test_queries_keys_and_values_share_one_scale() -> None:
    query, key, value = operands()
    small = value * 2**-22  # under the scale of the queries this is below E4M3's smallest value
    assert not fp8_attention(query, key, small, causal=True, scale=SCALE).any()


def test_grouped_keys_are_those_of_several_heads() -> None:
    query, key, value = operands(groups=2)
    wide = [x.repeat_interleave(2, dim=1) for x in (key, value)]
    expected = fp8_attention(query, *wide, causal=False, scale=SCALE)
    assert torch.equal(fp8_attention(query, key, value, causal=False, scale=SCALE), expected)


def test_keys_of_another_length() -> None:
    query, key, value = operands(keys=16)
    exact = F.scaled_dot_product_attention(query.float(), key.float(), value.float())
    assert (fp8_attention(query, key, value, causal=False, scale=SCALE) - exact).norm() < 0.08 * exact.norm()


def test_a_value_of_attention_that_is_not_finite_shows() -> None:
    query, key, value = operands()
    value[0, 0, 0, 0] = math.inf
    assert fp8_attention(query, key, value, causal=True, scale=SCALE).isnan().any()


@pytest.mark.filterwarnings("ignore")  # the own deprecations of Dynamo and Inductor
def test_compiled_attention_computes_the_same() -> None:
    leaves = [x.float().requires_grad_() for x in operands()]
    eager = fp8_attention(*leaves, causal=True, scale=SCALE)
    compiled = torch.compile(fp8_attention, fullgraph=True)(*leaves, causal=True, scale=SCALE)
    grad = torch.randn_like(eager)
    for ours, theirs in zip(
        torch.autograd.grad(compiled, leaves, grad), torch.autograd.grad(eager, leaves, grad), strict=True
    ):
        assert (ours - theirs).norm() < 0.01 * theirs.norm()
    assert (compiled - eager).norm() < 0.01 * eager.norm()
