"""Sums of gradients that backward forms in 16 bits."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoprec.graph.census import Observation
from autoprec.trial.inside.judging.forward import Step
from autoprec.trial.inside.judging.lines.sums import gathered
from autoprec.trial.inside.judging.shadow import ShadowRecorder
from autoprec.tuning.lint.judged import assess
from autoprec.tuning.lint.rules import Finding

ROWS = torch.arange(2000) % 3


def found(use: Callable[[nn.ModuleDict, Tensor], Tensor], dtype: torch.dtype = torch.bfloat16) -> list[Observation]:
    torch.manual_seed(0)
    model = nn.ModuleDict({"table": nn.Embedding(8, 16), "linear": nn.Linear(16, 16)}).to(dtype)
    with ShadowRecorder(model) as recorder:
        out = use(model, model["linear"](torch.rand(8, 16, dtype=dtype)))
        (out * torch.rand(out.shape, dtype=out.dtype)).float().sum().backward()
    return list(gathered(Step(recorder, recorder.report())))


@pytest.mark.parametrize(
    "use",
    [
        lambda model, h: h[ROWS],
        lambda model, h: h[ROWS % 2, ROWS],
        lambda model, h: model["table"](ROWS),
        lambda model, h: F.embedding(ROWS, h),
        lambda model, h: F.embedding(ROWS, model["linear"].weight),
        lambda model, h: torch.cat([h[ROWS], h[ROWS + 1]]),
    ],
)
def test_a_row_that_is_read_often_has_a_gradient_that_is_off(use: Callable[..., Tensor]) -> None:
    (seen,) = {one.where: one for one in found(use)}.values()
    assert (seen.code, seen.figures["to"]) == ("reduction-16bit", "bf16")
    assert seen.where.startswith(__file__)
    assert seen.figures["error"] > 0.03
    severity, words = assess(seen)
    message = Finding(seen.code, data=words, seen=seen).message
    assert severity == "warning"
    assert " of bf16 values, in the backward of this line, loses digits: its result is " in message


@pytest.mark.parametrize(
    "use",
    [
        lambda model, h: h.float()[ROWS],  # as the finding says
        lambda model, h: F.embedding(ROWS, model["table"].weight.float()).bfloat16(),
        lambda model, h: h[torch.arange(8)],
        lambda model, h: model["table"](torch.arange(8)),
        lambda model, h: h.repeat(100, 1),
    ],
)
def test_what_is_summed_in_fp32_or_read_once_is_not_named(use: Callable[..., Tensor]) -> None:
    assert found(use) == []


def test_fp32_is_left_alone() -> None:
    assert found(lambda model, h: h[ROWS], torch.float32) == []
