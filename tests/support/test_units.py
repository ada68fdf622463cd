"""One unit for memory."""

import pytest

from autoprec.support.units import memory_text


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (None, "–"),
        (0, "0.0 MiB"),
        (40_000_000, "38.1 MiB"),
        (128_000_000, "0.12 GiB"),
        (2**30, "1.00 GiB"),
        (1.5 * 2**30, "1.50 GiB"),
        (38_370_000_000, "35.7 GiB"),
        (80_000_000_000, "74.5 GiB"),
        (2**40, "1,024.0 GiB"),
    ],
)
def test_memory_is_in_gib_and_little_of_it_in_mib(size: float | None, text: str) -> None:
    assert memory_text(size) == text
