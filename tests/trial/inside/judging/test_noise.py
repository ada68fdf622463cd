"""Noise that is made of uniform random numbers in 16 bits."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoprec.graph.census import Observation
from autoprec.trial.inside.judging.forward import Step
from autoprec.trial.inside.judging.noise import NoiseRecorder, noise
from autoprec.tuning.lint.judged import assess
from autoprec.tuning.lint.rules import Finding

BF16, FP16 = torch.bfloat16, torch.float16


def found(make: str, dtype: torch.dtype = BF16) -> list[Observation]:
    """Return what is seen where noise is made by an expression of ``u`` and ``v``, drawn like the logits ``x``."""
    torch.manual_seed(0)
    model = nn.Linear(8, 64).to(dtype)
    with NoiseRecorder(model) as recorder:
        x: Tensor = model(torch.rand(256, 8, dtype=dtype))
        words = {"torch": torch, "F": F, "x": x, "pi": math.pi}
        if "u" in make:
            words["u"] = torch.rand_like(x)
        if "v" in make:
            words["v"] = torch.rand(x.shape, dtype=dtype)
        x = x + 0.1 * eval(make, words).to(dtype)
        loss = x.float().square().mean()
        root = recorder.value_of(loss)
        loss.backward()
    return list(noise(Step(recorder, recorder.report(), roots=(root,))))


@pytest.mark.parametrize(
    ("make", "dtype"),
    [
        ("-torch.log(-torch.log(u))", BF16),
        ("-torch.log(-torch.log(u))", FP16),
        ("-(-x.clone().uniform_().log()).log()", BF16),
        ("-torch.log(-torch.log(u.float()))", BF16),  # cast too late
        ("torch.logit(u)", BF16),
        ("u.log() - torch.log1p(-u)", BF16),
        ("torch.sqrt(-2 * u.log()) * torch.cos(2 * pi * v)", BF16),
        ("torch.erfinv(2 * u - 1) * 2 ** 0.5", BF16),
        ("(u - 0.5).sign() * torch.log(1 - 2 * (u - 0.5).abs())", BF16),
        ("u ** -0.1", BF16),
    ],
)
def test_noise_that_is_infinite_in_16_bits_alone_is_an_error(make: str, dtype: torch.dtype) -> None:
    (seen,) = found(make, dtype)
    severity, words = assess(seen)
    assert (seen.code, severity, words["to"]) == ("noise-16bit", "error", "bf16" if dtype is BF16 else "fp16")
    assert 0 < seen.figures["infinite"] < 0.01
    assert (seen.where + str(seen.also)).count(__file__) >= 1
    assert "% of what is made of them is infinite" in Finding(seen.code, data=words, seen=seen).message


@pytest.mark.parametrize(
    "make",
    [
        "-torch.log(-torch.log(u + 1e-6) + 1e-6)",
        "-torch.log(-torch.log(u.clamp(1e-6, 1 - 1e-6)))",
        "-torch.log1p(-u)",
        "torch.sqrt(-2 * torch.log(1 - u)) * torch.cos(2 * pi * v)",
        "(1 - u) ** -0.3",
    ],
)
def test_noise_whose_tail_is_cut_off_is_a_warning(make: str) -> None:
    (seen,) = found(make)
    severity, words = assess(seen)
    assert (severity, seen.figures["infinite"]) == ("warning", 0.0)
    assert "the tail of what is made of them is cut off" in Finding(seen.code, data=words, seen=seen).message


@pytest.mark.parametrize(
    ("make", "dtype"),
    [
        ("-torch.log(-torch.log(torch.rand(x.shape).clamp(1e-7, 1 - 1e-7)))", BF16),  # as the finding says
        ("F.gumbel_softmax(x)", BF16),
        ("-torch.empty_like(x).exponential_().log()", BF16),
        ("torch.randn_like(x)", BF16),
        ("(u < 0.9) / 0.9", BF16),  # dropout
        ("(0.9 + u).floor()", BF16),  # stochastic depth
        ("u - 0.5", BF16),
        ("(u - v) * 0.1", BF16),
        ("torch.exp(2 * u - 1)", BF16),
        ("torch.exp(10 * u - 6)", BF16),  # levels of noise, evenly over their logarithms
        ("torch.cos(u * pi / 2)", BF16),
        ("F.silu(2 * u - 1)", BF16),
        ("torch.lerp(x, x * 2, u)", BF16),
        ("torch.bernoulli(u)", BF16),
        ("F.rrelu(x, training=True)", BF16),
        ("u.sqrt()", BF16),
        ("torch.log(x.clone().uniform_(0.5, 1.5))", BF16),
        ("-torch.log(-torch.log(u + 1e-4) + 1e-4)", FP16),
        ("-torch.log(-torch.log(u))", torch.float32),
    ],
)
def test_noise_that_is_distributed_as_in_fp32_is_not_named(make: str, dtype: torch.dtype) -> None:
    assert found(make, dtype) == []


def test_numbers_that_the_loss_is_not_made_of_are_nobody_s() -> None:
    model = nn.Linear(8, 64).bfloat16()
    with NoiseRecorder(model) as recorder:
        loss = model(torch.rand(256, 8, dtype=BF16)).float().mean()
        torch.rand(4096, dtype=BF16).log().sum()
        root = recorder.value_of(loss)
        loss.backward()
    assert list(noise(Step(recorder, recorder.report(), roots=(root,)))) == []
    assert recorder.noises


def test_the_script_s_random_numbers_stay_as_they_are() -> None:
    drawn = []
    for recorder in (NoiseRecorder(nn.Linear(2, 2)), None):
        torch.manual_seed(3)
        if recorder is None:
            drawn += [torch.rand(2048, dtype=BF16).log(), torch.rand(5)]
        else:
            with recorder:
                drawn += [torch.rand(2048, dtype=BF16).log(), torch.rand(5)]
    assert torch.equal(drawn[0], drawn[2])
    assert torch.equal(drawn[1], drawn[3])
