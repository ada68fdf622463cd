"""Scales: torchao's arithmetic, powers of two, zeros, non-finite values, and Transformer Engine's delayed scaling."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autoprec.numerics.scaling import DelayedScale, amax_of, inverse_of, power_of_2_floor, scale_of


def test_amax_of_tensors_rows_and_columns() -> None:
    x = torch.tensor([[1.0, -5.0], [3.0, 2.0]])
    assert amax_of(x).item() == 5.0
    assert amax_of(x, 1).tolist() == [[5.0], [3.0]]
    assert amax_of(x, 0).tolist() == [[3.0, 5.0]]
    assert amax_of(torch.zeros(0, 4)).item() == 0.0
    assert amax_of(torch.zeros(0, 4), 1).shape == (0, 1)
    assert amax_of(torch.zeros(0, 4), 0).shape == (1, 4)
    assert amax_of(torch.tensor([[1.0, math.nan]])).isnan()


def test_scale_brings_amax_to_the_limit_and_leaves_the_hopeless_alone() -> None:
    amax = torch.tensor([2.0, 0.0, math.inf, math.nan, 1e-45])
    scale = scale_of(amax, 448.0)
    assert scale.tolist()[:4] == [224.0, 1.0, 1.0, 1.0]
    assert scale[4] == torch.finfo(torch.float32).max
    inverse = inverse_of(scale, amax)
    assert inverse[:2].tolist() == pytest.approx([1 / 224.0, 1.0])
    assert inverse[2:4].isnan().all()


@settings(max_examples=100, deadline=None)
@given(st.floats(1e-30, 1e30))
def test_powers_of_two_are_rounded_down_exactly(value: float) -> None:
    found = power_of_2_floor(torch.tensor([value])).item()
    assert math.log2(found) == int(math.log2(found))
    assert found <= torch.tensor(value).item() < 2 * found


def test_epsilon_bounds_amax() -> None:
    assert scale_of(torch.tensor(1e-6), 448.0, epsilon=1e-2).item() == pytest.approx(44800.0)


def stepped(delayed: DelayedScale, amax: float) -> float:
    """Take a step in which one forward has seen ``amax``; return the scale that it used."""
    used = delayed.step(torch.tensor(amax), update=True).item()
    delayed.roll()
    return used


def test_delayed_scaling_uses_the_past() -> None:
    delayed = DelayedScale(448.0, length=2, algorithm="max", margin=0)
    used = [stepped(delayed, a) for a in (1.0, 4.0, 2.0, 2.0, 2.0)]
    assert used == [448.0, 448.0, 112.0, 112.0, 224.0]
    recent = DelayedScale(448.0, length=8, algorithm="most_recent", margin=1)
    assert [stepped(recent, a) for a in (1.0, 4.0, 2.0)] == [224.0, 224.0, 56.0]


@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
@pytest.mark.parametrize("amaxes", [(1.0, 4.0, 2.0), (4.0, 1.0, 2.0), (4.0, math.inf), (math.nan, 4.0), (0.0, 4.0)])
def test_a_step_of_several_forwards_is_one_entry_of_the_history(algorithm: str, amaxes: tuple[float, ...]) -> None:
    delayed = DelayedScale(448.0, length=3, algorithm=algorithm, margin=0)
    stepped(delayed, 7.0)
    used = [delayed.step(torch.tensor(a), update=True).item() for a in amaxes]
    assert set(used) == {64.0}  # the scale does not move within a step
    delayed.roll()
    assert delayed.history is not None
    assert delayed.history.tolist() == [4.0, 7.0, 0.0]
    delayed.roll()  # nothing was seen: another optimizer of the same model has stepped
    assert delayed.history.tolist() == [4.0, 7.0, 0.0]


def test_delayed_scaling_keeps_the_scale_over_zeros_and_infinities_and_without_update() -> None:
    delayed = DelayedScale(448.0, length=1, algorithm="max", margin=0)
    stepped(delayed, 1.0)
    for amax in (0.0, math.inf, math.nan):
        assert stepped(delayed, amax) == 448.0
    assert delayed.step(torch.tensor(7.0), update=False).item() == 448.0
    delayed.roll()
    assert delayed.step(torch.tensor(7.0), update=False).item() == 448.0


def test_while_there_is_no_history_each_call_uses_its_own_amax() -> None:
    delayed = DelayedScale(448.0, length=4, algorithm="max", margin=0)
    own = [delayed.step(torch.tensor(a), update=True).item() for a in (1.0, 2.0)]
    assert own == [448.0, 224.0]
    assert delayed.seen == 2.0
    delayed.learn(torch.tensor(4.0))  # another rank saw more
    assert delayed.step(torch.tensor(1.0), update=True).item() == 112.0
    assert delayed.history is not None
    assert delayed.history.tolist() == [4.0, 0.0, 0.0, 0.0]


def test_an_operand_only_other_ranks_have_seen() -> None:
    delayed = DelayedScale(448.0, length=4, algorithm="max", margin=0)
    delayed.learn(torch.tensor(0.0))
    assert delayed.step(torch.tensor(2.0), update=False).item() == 224.0  # zero taught nothing
    delayed.learn(torch.tensor(4.0))
    assert delayed.step(torch.tensor(2.0), update=True).item() == 112.0


@pytest.mark.parametrize("length", [1, 2, 16, 1024])
@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, 0.0])
def test_a_bad_batch_leaves_history_and_scale_as_they_are(length: int, algorithm: str, bad: float) -> None:
    delayed = DelayedScale(448.0, length=length, algorithm=algorithm, margin=0)
    plain = DelayedScale(448.0, length=length, algorithm=algorithm, margin=0)
    for amax in (1.0, 4.0, bad, 2.0, 2.0, 8.0, 1.0):
        found = stepped(delayed, amax)
        if amax != bad:
            assert found == stepped(plain, amax)
    assert delayed.scale == plain.scale


@pytest.mark.parametrize("first", [math.inf, math.nan, 0.0])
def test_a_first_batch_that_teaches_nothing_is_not_scaled_and_not_remembered(first: float) -> None:
    delayed = DelayedScale(448.0, length=4, algorithm="max", margin=3)
    assert stepped(delayed, first) == 1.0
    assert stepped(delayed, 2.0) == 28.0  # as if it were the first


@pytest.mark.parametrize("limit", [448.0, 57344.0, 127.0, 6.0])
def test_the_quotient_is_rounded_once(limit: float) -> None:
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(1, 0x7F800000, (1_000_000,), dtype=torch.int32, generator=generator)  # every positive size
    amax = bits.view(torch.float32)
    wide = (limit / amax.double()).clamp(max=torch.finfo(torch.float32).max).float()
    assert torch.equal(scale_of(amax, limit), wide)


def test_what_is_larger_than_the_history_has_its_own_scale_in_evaluation() -> None:
    one = DelayedScale(448.0, length=4, algorithm="max", margin=1)
    one.learn(torch.tensor(2.0))
    of_history = one.step(torch.tensor(2.0), update=False)
    assert of_history == 112.0
    for amax, scale in ((1.0, 112.0), (2.0, 112.0), (8.0, 28.0), (0.0, 112.0), (float("inf"), 112.0)):
        assert one.wide_enough(of_history, torch.tensor(amax)) == scale
