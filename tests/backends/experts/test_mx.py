"""Grouped GEMMs in MXFP8 against the loop over experts, through torch's own checks of the call; no GPU."""

from __future__ import annotations

import pytest
import torch

from autoprec.numerics.linear import LinearExecution
from autoprec.policy import LayerPlan
from tests.backends.experts.helpers import BF16, MX, native, step

PLANS = {
    "mxfp8": LayerPlan.uniform(MX),
    "mxfp8, wgrad in bf16": LayerPlan(fprop=MX, dgrad=MX, wgrad=BF16),
    "mxfp8, wgrad alone": LayerPlan(fprop=BF16, dgrad=BF16, wgrad=MX),
}


@pytest.mark.usefixtures("blackwell")
@pytest.mark.parametrize("turned", [False, True], ids=["[E, N, K]", "[E, K, N]"])
@pytest.mark.parametrize("name", list(PLANS))
def test_one_call_gives_what_a_loop_over_experts_gives(name: str, turned: bool) -> None:
    _compare_mx(PLANS[name], turned, [10, 10, 43, 90, 97])


@pytest.mark.usefixtures("blackwell")
@pytest.mark.parametrize(
    "ends",
    [[0, 0, 0, 0, 0], [101] * 5, [0, 0, 0, 0, 1], [1, 2, 3, 4, 101], [32, 64, 64, 96, 101], [0, 129, 300, 300, 700]],
    ids=["none", "first", "one", "most", "multiples", "several tiles"],
)
def test_whichever_experts_have_tokens(ends: list[int]) -> None:
    _compare_mx(PLANS["mxfp8"], False, ends)


def _compare_mx(plan: LayerPlan, turned: bool, ends: list[int]) -> None:
    layer, loop = native(plan), LinearExecution(plan)
    generator = torch.Generator().manual_seed(0)
    rows, k, n = max(101, ends[-1]), 160, 288  # scales and tiles that end within a tile
    # few bits, and magnitudes apart by groups of 32: no sum is rounded, in whatever order it is computed
    x, weight, gradient = (
        torch.randint(-3, 4, shape, generator=generator).bfloat16()
        * torch.exp2(torch.randint(-2, 3, (*shape[:-1], shape[-1] // 32), generator=generator)).repeat_interleave(
            32, -1
        )
        for shape in ((rows, k), (5, k, n) if turned else (5, n, k), (rows, n))
    )
    found = step(layer, x, weight, gradient, turned=turned, ends=ends)
    wanted = step(loop, x, weight, gradient, turned=turned, ends=ends)
    for ours, theirs in zip(found, wanted, strict=True):
        assert torch.equal(ours, theirs.bfloat16())  # without bf16 units the loop keeps its float32 sums
    assert found[2].stride() == weight.stride()
    assert not layer.uncompiled
    if ends[-1]:
        assert layer.executed == loop.executed
