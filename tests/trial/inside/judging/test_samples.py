"""Samples of tensors, and errors on them."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from autoprec.trial.inside.judging.samples import half_ulp, relative_error, sampled

BF16 = torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.float32, BF16, torch.float16])
def test_half_an_ulp_is_what_is_lost_in_an_addition(dtype: torch.dtype) -> None:
    x = torch.tensor([1.0, 1.5, 3.0, 0.007, -100.0]).to(dtype)
    half = half_ulp(x)
    assert torch.equal((x.double() + 0.99 * half).to(dtype), x)
    assert not torch.equal((x.double() + 1.01 * half * x.sign()).to(dtype), x)


def test_samples_and_errors_of_odd_tensors() -> None:
    assert sampled(torch.arange(10.0), 4).tolist() == [0.0, 3.0, 6.0, 9.0]
    assert sampled(torch.zeros(0)).numel() == 0
    inf = torch.tensor([1.0, float("inf"), float("nan")])
    assert relative_error(inf, inf) == 0.0
    assert relative_error(torch.zeros(3), torch.zeros(3)) == 0.0


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.t().contiguous().t(),
        lambda x: torch.stack([x, x], -1)[..., 0],
        lambda x: x.clone(),
        lambda x: x.repeat(2, 1)[: len(x)],
    ],
)
@pytest.mark.parametrize("shape", [(64, 96), (1, 5000), (5000, 1)])
def test_a_sample_is_of_the_same_elements_whatever_the_strides(
    view: Callable[[Tensor], Tensor], shape: tuple[int, int]
) -> None:
    whole = torch.arange(float(shape[0] * shape[1])).reshape(shape)
    assert torch.equal(sampled(view(whole), 100), sampled(whole, 100))
    assert 40 < sampled(whole, 100).numel() <= 100


@pytest.mark.parametrize("width", [16, 96, 768])
def test_all_columns_are_looked_at(width: int) -> None:
    columns = torch.arange(width).expand(4096, width).contiguous()
    assert sampled(columns, 4 * width).unique().numel() > 0.9 * width
