"""One unit for memory."""

import pytest

from autoprec.support.units import memory_text


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 GiB"),
        (128_000_000, "0.119 GiB"),
        (80_000_000_000, "74.5 GiB"),
        (2**30, "1 GiB"),
        (2**40, "1,024.0 GiB"),
        (1.5 * 2**30, "1.5 GiB"),
    ],
)
def test_memory_is_in_gib(size: float, text: str) -> None:
    assert memory_text(size) == text
