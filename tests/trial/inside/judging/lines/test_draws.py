"""Outcomes that are drawn by looking a uniform number up in a cumulative sum."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoprec.graph.census import Observation
from autoprec.trial.inside.judging.forward import Step
from autoprec.trial.inside.judging.lines.draws import moved
from autoprec.trial.inside.judging.noise import NoiseRecorder, noise
from autoprec.tuning.lint.judged import assess
from autoprec.tuning.lint.rules import Finding

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def found(make: str, dtype: torch.dtype = BF16, outcomes: int = 1000) -> list[Observation]:
    """Return what is seen where actions are drawn by an expression of logits ``z``."""
    torch.manual_seed(0)
    model = nn.Linear(8, outcomes)
    with NoiseRecorder(model) as recorder:
        z: Tensor = model(torch.rand(32, 8))
        action = eval(make, {"torch": torch, "F": F, "z": z.detach(), "low": dtype})
        loss = -F.log_softmax(z, -1).gather(1, action.reshape(32, 1).clamp(max=outcomes - 1)).mean()
        root = recorder.value_of(loss)
        loss.backward()
    return list(noise(Step(recorder, recorder.report(), roots=(root,))))


@pytest.mark.parametrize(
    ("make", "dtype"),
    [
        ("(F.softmax(z.to(low), -1).cumsum(-1) < torch.rand(32, 1, dtype=low)).sum(-1)", BF16),
        ("(F.softmax(z.to(low), -1).cumsum(-1) < torch.rand(32, 1)).sum(-1)", BF16),
        ("(z.softmax(-1).cumsum(-1) <= torch.rand(32, 1, dtype=low)).sum(-1)", BF16),  # the number alone
        ("(torch.rand(32, 1, dtype=low) > z.softmax(-1).to(low).cumsum(-1)).sum(-1)", FP16),
        ("torch.searchsorted(z.softmax(-1).to(low).cumsum(-1), torch.rand(32, 1, dtype=low))", FP16),
        ("torch.searchsorted(z.softmax(-1).to(low).cumsum(-1).float(), torch.rand(32, 1))", BF16),
        ("(z.exp().to(low).cumsum(-1) < z.exp().to(low).sum(-1, True) * torch.rand(32, 1).to(low)).sum(-1)", BF16),
        ("(torch.rand(32, 1, dtype=low) >= z.to(low).softmax(-1).cumsum(-1)).int().argmin(-1)", BF16),
    ],
)
def test_a_draw_that_16_bits_change_is_named(make: str, dtype: torch.dtype) -> None:
    (seen,) = found(make, dtype)
    severity, words = assess(seen)
    expected = ("error", "bf16") if dtype is BF16 else ("warning", "fp16")
    assert (seen.code, severity, words["to"]) == ("noise-16bit", *expected)
    assert "% of the probability goes to other outcomes" in Finding(seen.code, data=words, seen=seen).message


@pytest.mark.parametrize(
    "make",
    [
        "(z.softmax(-1).cumsum(-1) < torch.rand(32, 1)).sum(-1)",
        "(z.to(low).float().softmax(-1).cumsum(-1) < torch.rand(32, 1)).sum(-1)",
        "torch.multinomial(z.to(low).softmax(-1), 1)",
        "(z.to(low).softmax(-1).cumsum(-1) < 0.9).sum(-1)",  # a nucleus
        "(z.to(low).cumsum(-1) < torch.rand(32, 1, dtype=low)).sum(-1)",  # no probabilities: it falls as well
        "(z.to(low) < torch.rand(32, 1, dtype=low)).sum(-1)",
    ],
)
def test_what_fp32_draws_or_is_no_draw_is_not_named(make: str) -> None:
    assert found(make) == []


def test_few_outcomes_are_a_warning_or_nothing() -> None:
    make = "(z.to(low).softmax(-1).cumsum(-1) < torch.rand(32, 1, dtype=low)).sum(-1)"
    assert [assess(one)[0] for one in found(make, outcomes=16)] == ["warning"]
    assert found(make, FP16, outcomes=4) == []


def test_share_of_the_probability_that_moves() -> None:
    exact = torch.full((2, 1024), 1 / 1024).cumsum(-1)
    assert moved(exact, exact, "fp32") == 0.0
    assert moved(exact, exact, "bf16") == pytest.approx(0.75, abs=0.01)  # 256 numbers hit one outcome in four
    assert moved(exact[:, :, None], exact[:, :, None], "fp32") == 0.0
    assert moved(exact.flip(-1), exact.flip(-1), "bf16") == 0.0
