"""Every reason to stay names its true cause."""

from __future__ import annotations

from typing import Any

import pytest

from autoprec.cost import reasons
from autoprec.cost.kernels import LayerCost
from autoprec.cost.reasons import Rival, layer_reason, model_reason

SHARES = {"tunable": 0.17, "launch": 0.05}
LARGE = (512, 256, 256)


def row(gain: float, blocked: str = "", shape: tuple[int, int, int] = (64, 32, 16), **times: float) -> dict[str, Any]:
    figures = {"gain_ms": gain, "gain": gain, "baseline_ms": 1.0, "times_ms": times}
    return {**figures, "shapes": [list(shape)], "blocked": blocked}


def cost(gemm: float, cast: float = 0.0) -> LayerCost:
    return LayerCost(gemm=gemm, cast=cast, kernels=1.0, error=0.1)


def test_few_gemms_are_not_called_small() -> None:
    found = model_reason([row(0.04, keep=1.0, bf16=0.96)], "keep", SHARES, cpu=False)
    assert found == "every layer gains, by 4% at most, but layers that may change take 17% of the step, launches 5%"
    mixed = [row(0.3, bf16=1.0, fp8=0.7) | {"baseline_ms": 9.0}, row(0.0, bf16=1.0, fp8=1.5)]
    found = model_reason(mixed, "bf16", SHARES, cpu=False)
    assert found.startswith(
        "1 of 2 layers are below break-even; the others gain by 30% at most, but layers that may change take 17%"
    )
    assert "too small" not in found


def test_gemms_that_gain_next_to_nothing_are_called_small() -> None:
    mixed = [row(0.06, bf16=1.0, fp8=0.94) | {"baseline_ms": 9.0}, row(0.0, bf16=1.0, fp8=1.5)]
    found = model_reason(mixed, "bf16", SHARES, cpu=False)
    assert "the other GEMMs (the largest: M 64, K 32, N 16) are too small to gain more than 6%" in found


def test_a_script_in_that_precision_already() -> None:
    assert "already runs its GEMMs" in model_reason([row(0.0, keep=1.0, bf16=1.0)], "keep", SHARES, cpu=False)


def test_small_gemms_are_shown_without_those_that_have_no_quantised_choice() -> None:
    vocabulary = row(0.0, "not a multiple of 16", (64, 32, 50257), bf16=1.0, fp8=1.5)
    found = model_reason([row(0.0, bf16=1.0, fp8=1.5), vocabulary], "bf16", SHARES, cpu=False)
    assert found.startswith("1 of 2 layers are below break-even, 1 without a quantised choice: the GEMMs (the largest")
    assert "M 64, K 32, N 16) are too small to pay for casts" in found


@pytest.mark.parametrize(
    ("units", "says"),
    [
        ((), "this CPU has no bf16 instructions (bf16 GEMMs are 19.1 times slower than fp32 here)"),
        (("AMX",), "the GEMMs (the largest: M 512, K 256, N 256) are 19.1 times slower in bf16"),
        (None, "the GEMMs (the largest: M 512, K 256, N 256) are 19.1 times slower in bf16"),
    ],
)
def test_a_cpu_without_fast_bf16(monkeypatch: pytest.MonkeyPatch, units: tuple[str, ...] | None, says: str) -> None:
    monkeypatch.setattr(reasons, "cpu_bf16_units", lambda: units)
    rows = [row(0.0, shape=LARGE, keep=1.0, bf16=19.12), row(0.0, shape=LARGE, keep=1.0, bf16=19.12)]
    found = model_reason(rows, "keep", SHARES, cpu=True, script="train.py")
    assert found.startswith(says)
    assert found.endswith("to rehearse for a GPU: autoprec search --target h100 train.py")


def test_a_cpu_on_which_everything_is_emulated() -> None:
    found = model_reason([row(0.0, shape=LARGE, keep=1.0, fp8_rowwise=3.0, mxfp8=5.0)], "keep", SHARES, cpu=True)
    assert found.startswith("no choice is faster on a CPU: fp8_rowwise takes 3.00x")


def test_a_product_of_a_few_numbers_says_nothing_of_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    """A head of 32 x 4 x 1 took 715 times as long in bf16, the layers of the model 1.8 times: 715 was told."""
    monkeypatch.setattr(reasons, "cpu_bf16_units", lambda: ("AMX",))
    head = row(0.0, shape=(32, 4, 1), keep=0.001, bf16=0.715) | {"baseline_ms": 0.001}
    found = model_reason([head, row(0.0, shape=LARGE, keep=1.0, bf16=1.8)], "keep", SHARES, cpu=True)
    assert "are 1.8 times slower" in found
    assert "times slower" not in model_reason([head], "keep", SHARES, cpu=True)


def test_a_layer_below_break_even_says_what_its_casts_cost() -> None:
    slow = Rival("fp8_delayed", cost(6e-6, 12e-6), quantised=True)
    found = layer_reason(cost(10e-6), [slow], cpu=False)
    assert found == "below break-even: fp8_delayed takes 1.80x: its GEMMs save 4 us, its casts cost 12 us"


def test_a_layer_whose_gemms_are_no_faster_says_so() -> None:
    found = layer_reason(cost(10e-6), [Rival("fp8_delayed", cost(9.9e-6, 12e-6), quantised=True)], cpu=False)
    assert found.startswith("below break-even: fp8_delayed takes 2.19x: memory traffic and launches bound")


def test_emulation_is_called_emulation() -> None:
    emulated = Rival("fp8_rowwise", cost(30e-6), quantised=True)
    assert "fp8_rowwise is emulated on a CPU and takes 3.00x" in layer_reason(cost(10e-6), [emulated], cpu=True)
    bf16 = Rival("bf16", cost(20e-6), quantised=False)
    assert layer_reason(cost(10e-6), [emulated, bf16], cpu=True) == "no choice is faster: bf16 takes 2.00x"
    same = Rival("tf32", cost(10e-6), quantised=False)
    assert "already" in layer_reason(cost(10e-6), [same], cpu=False)
