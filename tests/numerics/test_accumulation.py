"""The limited accumulator: exact where it can be, a bias where it cannot."""

from __future__ import annotations

import torch

from autoprec.numerics.accumulation import CHUNK, limited_matmul


def test_small_integers_are_exact() -> None:
    a, b = torch.randint(-4, 5, (8, 96)).float(), torch.randint(-4, 5, (96, 8)).float()
    assert torch.equal(limited_matmul(a, b), a @ b)


def test_same_sign_sums_lose_a_bias_that_grows_with_length() -> None:
    generator = torch.Generator().manual_seed(0)
    errors = []
    for length in (CHUNK, 1024, 8192):
        a, b = torch.rand(4, length, generator=generator), torch.rand(length, 4, generator=generator)
        exact = (a.double() @ b.double()).float()
        found = limited_matmul(a, b)
        assert (found <= exact * (1 + 1e-6)).all()
        errors.append(((exact - found) / exact).mean().item())
    assert errors == sorted(errors)
    assert errors[0] < 2e-4 < 2e-3 < errors[-1] < 2e-2
