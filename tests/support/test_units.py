"""One unit for memory, and one way to write shares and times."""

import pytest

from autoprec.support.units import memory_text, parameters_text, percent_text, time_text


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


@pytest.mark.parametrize(
    ("value", "half_width", "text"),
    [
        (0.00016, None, "0.016 %"),
        (0.05, None, "5.00 %"),
        (0.234, None, "23.4 %"),
        (0.0006, 0.0002, "0.060 ± 0.020 %"),
        (-0.2, None, "-20.0 %"),
    ],
)
def test_a_share_keeps_the_digits_that_mean_something(value: float, half_width: float | None, text: str) -> None:
    assert percent_text(value, half_width) == text


@pytest.mark.parametrize(("ms", "text"), [(9.876, "9.88 ms"), (0.01234, "0.0123 ms"), (588.506, "588.5 ms")])
def test_times_are_in_milliseconds(ms: float, text: str) -> None:
    assert time_text(ms) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (1, "1"),
        (8705, "8,705"),
        (999_999, "999,999"),
        (1_000_704, "1.0 M"),
        (5_500_000, "5.5 M"),
        (8_030_000_000, "8.0 B"),
    ],
)
def test_a_small_model_has_parameters(count: int, text: str) -> None:
    assert parameters_text(count) == f"{text} parameters"
