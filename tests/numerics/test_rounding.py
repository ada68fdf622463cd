"""Rounding against torch's own casts, on values of every size, and on each code of each 8-bit format."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autoprec.numerics.rounding import (
    STORAGE,
    decode,
    encode,
    hashed_noise,
    number,
    round_e2m1,
    round_e2m1_stochastic,
    round_tf32,
    split_to_grid,
    to_grid,
)
from autoprec.precision.formats import FORMATS

#: The non-negative values of E2M1.
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def wide_values(count: int = 200_000) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(count, generator=generator)
    spread = torch.exp(torch.randn(count, generator=generator) * 8)
    special = torch.tensor(
        [0.0, -0.0, 1e-45, -1e-40, 2.0**-9, 2.0**-10, 1.5 * 2.0**-9, 448, 449, 464, 480, 57344, 1e30]
    )
    return torch.cat([normal * spread, special, -special])


@pytest.mark.parametrize("name", ["e4m3", "e5m2"])
def test_encoding_is_torchs_cast_of_clamped_values(name: str) -> None:
    x, limit = wide_values(), FORMATS[name].max
    expected = x.clamp(-limit, limit).to(STORAGE[name])
    assert torch.equal(encode(x, name).view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("name", ["e4m3", "e5m2"])
def test_overflow_saturates_and_nan_stays(name: str) -> None:
    limit = FORMATS[name].max
    x = torch.tensor([float("inf"), -float("inf"), 3e38, float("nan")])
    back = encode(x, name).float()
    assert back[:3].tolist() == [limit, -limit, limit]
    assert back[3].isnan()


@pytest.mark.parametrize("name", ["e4m3", "e5m2"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_every_code_reads_back(name: str, dtype: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(STORAGE[name])
    expected = codes.float()
    finite = expected.isfinite()
    assert torch.equal(decode(codes, dtype).float()[finite], expected[finite])


@pytest.mark.parametrize("name", ["e4m3", "e5m2"])
def test_the_float32_grid_is_the_cast(name: str) -> None:
    x, f = wide_values(), FORMATS[name]
    assert torch.equal(to_grid(x, f.mantissa, f.min_exponent, f.max), encode(x, name).float())


def test_e2m1_takes_the_nearest_value_ties_to_even() -> None:
    x = torch.linspace(-8, 8, 6401)
    grid = torch.tensor([*[-v for v in reversed(E2M1_VALUES[1:])], *E2M1_VALUES])
    rounded = round_e2m1(x)
    assert set(rounded.tolist()) == set(grid.tolist())
    nearest = (x.clamp(-6, 6)[:, None] - grid).abs().amin(1)
    assert torch.allclose((x.clamp(-6, 6) - rounded).abs(), nearest)
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    assert round_e2m1(ties).tolist() == [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0]


@pytest.mark.parametrize(
    "noise",
    [
        lambda x: torch.rand(x.shape, generator=torch.Generator().manual_seed(1)),
        lambda x: hashed_noise(x, torch.tensor(3.25)),
    ],
    ids=["drawn", "hashed"],
)
def test_stochastic_rounding_is_unbiased_between_neighbours_and_repeatable(
    noise: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    x = torch.tensor([0.1, -0.3, 1.3, 2.2, -3.7, 5.5, 7.0, 0.0]).repeat(20_000, 1)
    drawn = round_e2m1_stochastic(x, noise(x))
    assert torch.equal(drawn, round_e2m1_stochastic(x, noise(x)))
    assert set(drawn.abs().unique().tolist()) <= set(E2M1_VALUES)
    assert torch.allclose(drawn.mean(0), x[0].clamp(-6, 6), atol=0.03)


def test_hashed_noise_is_uniform_and_says_nothing_of_values_neighbours_and_other_steps() -> None:
    x = torch.randn(512, 64, generator=torch.Generator().manual_seed(0))
    found, other = hashed_noise(x, torch.tensor(3.25)), hashed_noise(x, torch.tensor(3.26))
    counts = torch.histc(found, 16, 0, 1)
    assert float(found.min()) >= 0
    assert float(found.max()) < 1
    assert float((counts / counts.mean() - 1).abs().max()) < 0.1
    together = torch.stack([t.flatten() for t in (found, other, x, found.roll(1, 1), found.roll(1, 0))])
    assert float((torch.corrcoef(together) - torch.eye(5)).abs().max()) < 0.03
    same = hashed_noise(torch.full_like(x, 0.7), torch.tensor(3.25))
    assert same.unique().numel() > 0.99 * same.numel()


def test_tf32_keeps_ten_bits_ties_to_even() -> None:
    x = wide_values(10_000)
    rounded = round_tf32(x)
    assert torch.equal(rounded.view(torch.int32) & 0x1FFF, torch.zeros_like(rounded, dtype=torch.int32))
    normal = x.abs() > 1e-37
    assert ((rounded - x).abs() <= x.abs() * 2.0**-11)[normal].all()
    assert round_tf32(torch.tensor([1 + 2.0**-11, 1 + 3 * 2.0**-11])).tolist() == [1.0, 1 + 2.0**-9]
    odd = torch.tensor([float("nan"), float("inf"), -float("inf")])
    assert torch.equal(round_tf32(odd).isnan(), odd.isnan())
    assert torch.equal(round_tf32(odd)[1:], odd[1:])


@settings(max_examples=200, deadline=None)
@given(st.floats(width=32, allow_nan=False, allow_infinity=False), st.sampled_from(["e4m3", "e5m2"]))
def test_encoding_is_monotone_and_idempotent(value: float, name: str) -> None:
    once = encode(torch.tensor([value]), name)
    assert torch.equal(encode(once.float(), name).view(torch.uint8), once.view(torch.uint8))
    larger = encode(torch.tensor([value]) * 1.5 + 1, name).float()
    if value >= 0:
        assert (larger >= once.float()).all()


@pytest.mark.parametrize("name", ["e4m3", "e5m2", "e2m1"])
def test_splitting_rounds_as_the_bits_do(name: str) -> None:
    f = FORMATS[name]
    steps = torch.arange(2**f.mantissa, 2 ** (f.mantissa + 1)) + 0.5  # every tie
    ties = (steps[:, None] * 2.0 ** (torch.arange(-20.0, 16.0) - f.mantissa)).flatten()
    generator = torch.Generator().manual_seed(0)
    anything = torch.randint(0, 0x7F800000, (1_000_000,), dtype=torch.int32, generator=generator).view(torch.float32)
    x = torch.cat([ties, torch.nextafter(ties, 2 * ties), torch.nextafter(ties, 0 * ties), anything, torch.zeros(1)])
    x = torch.cat([x, -x, torch.tensor([torch.inf, -torch.inf, torch.nan])])
    found, wanted = (g(x, f.mantissa, f.min_exponent, f.max) for g in (split_to_grid, to_grid))
    assert torch.equal(found.view(torch.int32)[:-1], wanted.view(torch.int32)[:-1])  # signs of zeros, too
    assert found[-1].isnan()


def test_a_number_is_written_out_or_the_largest_of_a_format() -> None:
    assert [number(name) for name in ("e4m3", "e5m2", "int8")] == [448.0, 57344.0, 127.0]
    assert number(repr(1e-4)) == 1e-4
