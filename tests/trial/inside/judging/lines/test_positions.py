"""Positions that 16 bits cannot tell apart: named where they begin, with what follows from them."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from autoprec.graph.analysis.modules import ModelNames
from autoprec.graph.census import Observation
from autoprec.trial.inside.judging.forward import Step, seen
from autoprec.trial.inside.judging.lines.positions import positions, tables
from autoprec.trial.inside.judging.shadow import ShadowRecorder
from autoprec.tuning.lint.judged import assess
from autoprec.tuning.lint.rules import Finding

BF16, ROWS = torch.bfloat16, 600
#: What makes positions of bfloat16.
MADE = (
    lambda: torch.arange(ROWS, dtype=BF16),
    lambda: torch.arange(ROWS).to(BF16),
    lambda: torch.linspace(0, ROWS - 1, ROWS, dtype=BF16),
    lambda: torch.arange(ROWS).float().bfloat16(),
    lambda: torch.ones(ROWS, dtype=BF16).cumsum(0),
)


class Net(nn.Module):
    def __init__(self, bias: Callable[[], Tensor], freq: Tensor | None = None) -> None:
        super().__init__()
        self.linear, self.bias = nn.Linear(8, 8), bias
        if freq is not None:
            self.register_buffer("inv_freq", freq)

    def forward(self, x: Tensor) -> Tensor:
        bias = self.bias() if not hasattr(self, "inv_freq") else self.bias(self.inv_freq)  # type: ignore[call-arg]
        return self.linear(x) + bias.to(x.dtype)


def recorded(bias: Callable[..., Tensor], freq: Tensor | None = None, dtype: torch.dtype = BF16) -> Step:
    torch.manual_seed(0)
    model = Net(bias, freq).to(dtype)
    with ShadowRecorder(model) as recorder:
        model(torch.randn(ROWS, 8).to(dtype)).float().square().mean().backward()
    return Step(recorder, recorder.report(), scaled=True)


def line(one: Observation) -> int:
    return int(one.where.rpartition(":")[2])


def alibi(p: Tensor) -> Tensor:
    apart = p[None, :] - p[:, None]
    return (apart * torch.tensor(0.5, dtype=p.dtype))[:, :8]


def rotary(p: Tensor) -> Tensor:
    angle = torch.outer(p, torch.exp2(-torch.arange(4.0)).to(p.dtype))
    return torch.cat([angle.sin(), angle.cos()], -1)


def scaled(p: Tensor) -> Tensor:
    near = p / 4
    far = near * 2
    return far[:, None] * 1e-3


@pytest.mark.parametrize("use", [alibi, rotary, scaled])
@pytest.mark.parametrize("made", range(len(MADE)))
def test_what_is_made_of_positions_is_no_fault_of_its_own(use: Callable[[Tensor], Tensor], made: int) -> None:
    step = recorded(lambda: use(MADE[made]()))
    (found,) = positions(step)
    assert line(found) == MADE[made].__code__.co_firstlineno
    severity, words = assess(found)
    assert severity == "error"
    follows = "of them follow" in Finding(found.code, data=words, seen=found).message
    assert follows == (found.figures["derived"] > 0)
    assert {one.code for one in seen(step)} <= {"reduction-16bit"} if use is rotary else not seen(step)


def test_rows_of_positions_that_do_not_come_of_each_other_are_two() -> None:
    def both() -> Tensor:
        one = torch.arange(ROWS, dtype=BF16)
        other = torch.arange(ROWS, dtype=BF16) / 2
        return torch.stack([one, other, one, other], -1).repeat(1, 2) / 1e4

    assert [one.code for one in positions(recorded(both))] == ["positions-16bit"] * 2


@pytest.mark.parametrize("use", [alibi, rotary, scaled])
def test_positions_in_fp32_are_sound(use: Callable[[Tensor], Tensor]) -> None:
    assert list(positions(recorded(lambda: use(torch.arange(ROWS).float())))) == []


@pytest.mark.parametrize(
    ("dtype", "rows", "seen"), [(BF16, 2048, True), (torch.float32, 2048, False), (BF16, 64, False)]
)
def test_a_table_of_angles_in_16_bits_is_seen_by_the_angle_it_is_off(dtype: torch.dtype, rows: int, seen: bool) -> None:
    def turned(freq: Tensor) -> Tensor:
        angle = torch.outer(torch.arange(rows).float(), freq.float())
        return torch.cat([angle.cos(), angle.sin()], -1).repeat(ROWS // rows + 1, 1)[:ROWS]

    step = recorded(turned, 0.1 * torch.exp(-torch.arange(4.0) / 4), dtype)
    assert [one.code for one in positions(step)] == ["angles-16bit"] * seen


@pytest.mark.parametrize(("times", "severity"), [(BF16, "error"), (torch.float16, "warning"), (torch.float32, "")])
def test_angles_that_are_computed_in_16_bits_are_an_error_by_how_far_they_are_off(
    times: torch.dtype, severity: str
) -> None:
    def waves() -> Tensor:
        angle = torch.randint(0, 1000, (ROWS, 1)).to(times) * torch.exp2(-torch.arange(4.0)).to(times)
        return torch.cat([angle.sin(), angle.cos()], -1)

    assert [assess(one)[0] for one in positions(recorded(waves))] == ([severity] if severity else [])


def test_a_sum_of_reals_is_no_row_of_positions() -> None:
    assert list(positions(recorded(lambda: torch.rand(ROWS, dtype=BF16).cumsum(0)[:8]))) == []


@pytest.mark.parametrize("layers", [1, 3])
def test_tables_that_are_alike_are_told_once(layers: int) -> None:
    step = recorded(lambda: torch.zeros(8))
    model = nn.ModuleList(nn.Module() for _ in range(layers))
    for layer in model:
        angle = torch.arange(1024).to(BF16)[:, None] * torch.exp(-torch.arange(16) / 4).to(BF16)
        layer.register_buffer("cos_cached", angle.cos())
        layer.register_buffer("sin_cached", angle.sin())
    (found,) = tables(step, ModelNames(model))
    _, words = assess(found)
    message = Finding(found.code, data=words, seen=found).message
    assert message.endswith(f"; {2 * layers - 1} more table{'s' * (layers > 1)} alike")
    model.float()  # the rows stay as they are
    (found,) = tables(step, ModelNames(model))
    assert "in fewer bits than fp32" in Finding(found.code, data=assess(found)[1], seen=found).message
