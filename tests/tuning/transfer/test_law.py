"""The law of gradient errors: powers inside what was measured, held at its ends."""

import pytest

from autoprec.tuning.transfer.law import MEASURED, Growth, error_factor, growth, noise_factor
from tests.tuning.models import linear


def test_the_same_size_changes_nothing() -> None:
    assert error_factor(Growth()) == noise_factor(Growth()) == 1.0


def test_depth_hardly_changes_the_error_of_a_role() -> None:
    assert 0.8 < error_factor(Growth(depth=4.0)) < 1.0
    assert noise_factor(Growth(depth=4.0)) == 1.0


def test_wider_is_more_exact() -> None:
    assert error_factor(Growth(width=4.0)) < 0.7
    assert error_factor(Growth(width=0.25)) == pytest.approx(1 / error_factor(Growth(width=4.0)))


def test_what_was_not_measured_is_not_extrapolated() -> None:
    assert error_factor(Growth(width=1000.0)) == error_factor(Growth(width=MEASURED["width"]))
    assert noise_factor(Growth(tokens=1e5)) == noise_factor(Growth(tokens=MEASURED["tokens"])) < 1.0


def test_growth_is_read_from_shapes_and_blocks() -> None:
    pairs = [(linear(f"h.{i}.fc1", 4096, 512, 2048), linear(f"h.{i}.fc1", 256, 64, 256)) for i in range(3)]
    head = (linear("head", 4096, 512, 50000, flags=("head",)), linear("head", 256, 64, 96, flags=("head",)))
    found = growth([*pairs, head], {"mlp.in": (12, 3), "head": (1, 1)})
    assert (found.width, found.depth, found.tokens) == pytest.approx((8.0, 4.0, 16.0))
    assert found.describe() == "width x8, depth x4, tokens x16"
    assert growth([], {}) == Growth()
