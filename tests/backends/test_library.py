"""What library backends share, around a product that notes what reaches it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from autoprec.backends.library import LibraryExecution, wants_bf16
from autoprec.errors import UnsupportedError
from autoprec.policy import LayerPlan
from autoprec.precision.recipes import BUILTIN_RECIPES

BF16, FP8 = BUILTIN_RECIPES["bf16"], BUILTIN_RECIPES["fp8_tensorwise"]


def made(plan: LayerPlan, **options) -> tuple[LibraryExecution, list[torch.Tensor]]:
    seen: list[torch.Tensor] = []

    def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        seen.append(x.detach())
        return F.linear(x, weight.to(x.dtype))

    return LibraryExecution(plan, product, plan.labels, backend="lib", **options), seen


class DTensor(torch.Tensor):
    """Stands for torch's: known by its name."""


def test_a_weight_sharded_by_tensor_parallelism_is_refused() -> None:
    run, seen = made(LayerPlan.uniform(FP8), name="up")
    with pytest.raises(UnsupportedError, match=r"layer 'up'.*tensor parallelism(.|\n)*backend='native'"):
        run(torch.randn(2, 8), torch.randn(4, 8).as_subclass(DTensor), None)
    assert not seen


def test_ragged_rows_are_padded_with_zeros_and_cut_off_again() -> None:
    run, seen = made(LayerPlan.uniform(FP8), rows=16)
    x, weight, bias = torch.randn(2, 5, 8), torch.randn(4, 8), torch.randn(4)
    out = run(x, weight, bias)
    torch.testing.assert_close(out, F.linear(x, weight, bias))
    assert seen[0].shape == (16, 8)
    assert (seen[0][10:] == 0).all()


def test_what_ran_is_noted_gemm_by_gemm() -> None:
    run, _ = made(LayerPlan(fprop=FP8, dgrad=FP8, wgrad=BF16))
    x, weight = torch.randn(3, 8), torch.randn(4, 8, requires_grad=True)
    out = run(x, weight, None)
    assert run.executed == {"fprop": FP8.describe()}
    out.sum().backward()
    assert run.executed == {"fprop": FP8.describe(), "wgrad": "bf16"}  # the input needs no gradient
    assert run.describe().endswith("by lib")


def test_a_kept_gemm_says_what_it_computes_in() -> None:
    run, seen = made(LayerPlan(fprop=None, dgrad=FP8, wgrad=FP8), compute=torch.bfloat16)
    assert run(torch.randn(3, 8), torch.randn(4, 8), None).dtype is torch.float32
    assert seen[0].dtype is torch.bfloat16
    assert run.executed == {"fprop": "bf16"}


def test_an_empty_batch_reaches_no_library() -> None:
    run, seen = made(LayerPlan.uniform(FP8))
    assert run(torch.randn(0, 8), torch.randn(4, 8), None).shape == (0, 4)
    assert seen == []


def test_bf16_in_a_plan() -> None:
    assert wants_bf16(LayerPlan(fprop=FP8, dgrad=FP8, wgrad=BF16))
    assert not wants_bf16(LayerPlan.uniform(FP8))
    assert LayerPlan(fprop=FP8).labels == {"fprop": FP8.describe(), "dgrad": "keep", "wgrad": "keep"}
