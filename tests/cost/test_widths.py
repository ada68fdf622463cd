from __future__ import annotations

import pytest
import torch
from torch import nn

from autoprec.cost.peak import Lifetimes
from autoprec.cost.widths import Widths, widths
from autoprec.graph.recorder import StepRecorder

ROWS, WIDTH = 32, 16


class Model(nn.Module):
    """A layer, a norm, a layer, and a residual in float32 around both."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.start = nn.Parameter(torch.randn(ROWS, WIDTH))

    def forward(self) -> torch.Tensor:
        start = torch.nn.functional.layer_norm(self.start, (WIDTH,))
        return start + torch.relu(self.second(self.norm(self.first(start))))


@pytest.fixture(scope="module")
def lifetimes() -> Lifetimes:
    torch.manual_seed(0)
    model = Model()
    with StepRecorder(model) as recorder:
        (model() ** 2).mean().backward()
    return Lifetimes.of(recorder.report())


def at(lifetimes: Lifetimes, name: str, module: str = "") -> int:
    rows = lifetimes.report.operators
    return next(i for i, row in enumerate(rows) if row.op == f"aten::{name}" and row.module == module)


def under(lifetimes: Lifetimes, *wide: str) -> Widths:
    return widths(lifetimes, "bf16", wide)


def test_a_norm_in_float32_widens_what_it_reads_and_its_layer_casts_again(lifetimes: Lifetimes) -> None:
    norm, found = at(lifetimes, "native_layer_norm", "norm"), under(lifetimes, "norm")
    assert found.casts[norm] == (ROWS * WIDTH, 0.0)
    assert norm not in found.low
    assert found.inputs["second"] == 4.0


def test_a_norm_in_16_bits_casts_nothing(lifetimes: Lifetimes) -> None:
    norm, found = at(lifetimes, "native_layer_norm", "norm"), under(lifetimes)
    assert norm not in found.casts
    assert norm in found.low
    assert found.inputs["second"] == 2.0


def test_a_sum_of_two_widths_is_one_in_float32(lifetimes: Lifetimes) -> None:
    found = under(lifetimes, "norm")
    assert at(lifetimes, "relu") in found.low
    assert at(lifetimes, "add") not in found.low
    assert found.casts[at(lifetimes, "add")] == (ROWS * WIDTH, 0.0)


def test_what_is_outside_the_model_stays_in_float32(lifetimes: Lifetimes) -> None:
    assert at(lifetimes, "pow", "<script>") not in under(lifetimes, "norm").low


def test_backward_is_as_wide_as_forward(lifetimes: Lifetimes) -> None:
    wide, narrow = under(lifetimes, "norm"), under(lifetimes)
    back = at(lifetimes, "native_layer_norm_backward", "norm")
    assert back not in wide.low
    assert back in narrow.low
    assert at(lifetimes, "threshold_backward") in wide.low
