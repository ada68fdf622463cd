"""The table of originals: its cheap rows, and that a difference is not overlooked."""

from __future__ import annotations

import torch

from benchmarks.numerics import originals_numerics, originals_state
from benchmarks.numerics.originals_rows import COMPARISONS, Row


def test_rows_that_need_no_package_agree() -> None:
    runs = (
        *(originals_numerics.deepseek, originals_numerics.delayed, originals_numerics.transform),
        *(originals_numerics.layers_of_one_dtype, originals_state.gradient_penalty, originals_state.msamp),
    )
    rows = [row for run in runs for row in run()]
    assert {row.verdict for row in rows} <= {"bit-equal", "within rounding"}, [(r.quantity, r.difference) for r in rows]
    assert sum(row.verdict == "bit-equal" for row in rows) >= 23
    assert len(COMPARISONS) >= 19


def test_a_difference_is_told() -> None:
    one, nan = torch.tensor([1.0, 2.0]), torch.tensor([1.0, torch.nan])
    assert Row("x", "y", one, one + 1e-3).verdict == "DIFFERENT"
    assert Row("x", "y", one, one + 1e-3, 1e-2).verdict == "within rounding"
    assert Row("x", "y", one, one + 1e-3, 1e-5, "why").verdict == "DIFFERENT"
    assert Row("x", "y", nan, nan).verdict == "bit-equal"
    assert Row("x", "y", one, nan).verdict == "DIFFERENT"
