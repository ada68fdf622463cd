"""What lifted lines are told by."""

import pytest

from autoprec.trial.lifted import LiftedLines, least_change


@pytest.mark.parametrize(("noise", "least"), [(None, 1e-5), (0.0, 1e-5), (1e-6, 1e-5), (0.01, 0.02)])
def test_lines_change_something_beyond_twice_what_a_few_bits_do(noise: float | None, least: float) -> None:
    assert least_change(noise) == least
    assert LiftedLines().rows == ()
