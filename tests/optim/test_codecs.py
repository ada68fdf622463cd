import math
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autoprec.optim.codecs import CODECS, PairCodec, _dynamic_map, _look_up, codec
from autoprec.policy import OptimizerPolicy
from autoprec.policy.sections import STEPPING

LOSSY = {
    "bf16": 2**-8,
    "e4m3": 2**-4,
    "fp16_scaled": 2**-11,
    "fp16_tensor": 2**-11,
    "int8_block": 0.05,
}


def values(seed: int, shape: tuple[int, ...], exponent: int, positive: bool) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    made = torch.randn(shape, generator=generator) * 2.0**exponent
    return made.square() if positive else made


@pytest.mark.parametrize("key", list(CODECS), ids="/".join)
@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**16),
    shape=st.sampled_from([(1,), (3, 5), (128,), (257,), (16, 33), (2, 3, 4)]),
    exponent=st.integers(-40, 20),
)
def test_encoding_what_was_decoded_changes_nothing(key, seed, shape, exponent):
    how = CODECS[key]
    x = values(seed, shape, exponent, key[0] == "exp_avg_sq")
    once = how.decode(how.encode(x), x.shape)
    assert once.dtype == torch.float32
    assert once.shape == x.shape
    kept = how.exact(how.encode(x), x.shape) if isinstance(how, PairCodec) else once
    again = how.encode(kept)
    assert torch.equal(how.decode(again, x.shape), once)


@pytest.mark.parametrize("key", list(CODECS), ids="/".join)
def test_large_values_keep_the_relative_precision_of_the_format(key):
    how = CODECS[key]
    x = torch.linspace(0.5, 1.0, 500)
    error = (how.decode(how.encode(x), x.shape) / x - 1).abs().max()
    assert error <= LOSSY.get(how.name, 2**-4)


@pytest.mark.parametrize("seed", range(3))
def test_msamps_format_is_one_power_of_two_scale_per_tensor_and_stalls_where_ours_does_not(seed):
    """msamp/common/tensor/meta.py: 2 ** floor(log2(max / amax)); both round to nearest."""
    x = values(seed, (64, 64), -9 + seed, False)
    formats = {("exp_avg", "e4m3_tensor"): torch.float8_e4m3fn, ("exp_avg_sq", "fp16_tensor"): torch.float16}
    for key, dtype in formats.items():
        x = x.square() if key[0] == "exp_avg_sq" else x
        scale = 2.0 ** math.floor(math.log2(torch.finfo(dtype).max / x.abs().max().item()))
        expected = (x * scale).to(dtype).float() / scale
        assert torch.equal(CODECS[key].decode(CODECS[key].encode(x), x.shape), expected)
    gradient, share = values(seed, (256,), 0, False), {}
    for name in ("e4m3_tensor", "e4m3"):
        how, moment = CODECS["exp_avg", name], torch.zeros(256)
        for _ in range(100):
            moment = how.decode(how.encode(0.9 * moment + 0.1 * gradient), moment.shape)
        share[name] = (moment / gradient).mean().item()
    assert share["e4m3_tensor"] < 0.85
    assert share["e4m3"] > 0.9


@pytest.mark.parametrize("key", list(CODECS), ids="/".join)
def test_zeros_stay_zeros(key):
    how = CODECS[key]
    x = torch.zeros(3, 100)
    assert torch.equal(how.decode(how.encode(x), x.shape), x)


@pytest.mark.parametrize("key", [k for k in CODECS if k[0] == "exp_avg_sq" and k[1] != "fp16_tensor"], ids="/".join)
def test_a_second_moment_is_never_flushed_to_zero(key):
    how = CODECS[key]
    x = torch.cat([torch.logspace(-30, 0, 512), torch.logspace(-12, -2, 256)])
    kept = how.decode(how.encode(x), x.shape)
    blocks = x.view(-1, 128).amax(1, keepdim=True).expand(-1, 128).reshape(-1)
    assert (kept[blocks > 1e-30] > 0).all()
    assert (kept >= x * 0.9)[x < blocks * 1e-7].all()  # lifted, never lowered


@pytest.mark.parametrize("key", [k for k in CODECS if k[0] == "gradients"], ids="/".join)
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_a_non_finite_gradient_stays_non_finite(key, bad):
    how = CODECS[key]
    x = torch.randn(300)
    x[77] = bad
    assert not torch.isfinite(how.decode(how.encode(x), x.shape)).all()


def test_stochastic_rounding_is_unbiased_and_reproducible():
    how, x = (
        CODECS["weights", "bf16_stochastic"],
        torch.full((200_000,), 1.0 + 2**-9),
    )  # a quarter of a bf16 step above 1
    rounded = how.encode(x, torch.Generator().manual_seed(3))[0].float()
    assert set(rounded.tolist()) == {1.0, 1.0 + 2**-7}
    assert abs(float((rounded > 1).float().mean()) - 0.25) < 0.005
    again = how.encode(x, torch.Generator().manual_seed(3))[0].float()
    assert torch.equal(rounded, again)


def test_stochastic_rounding_leaves_the_global_generator_alone():
    before = torch.get_rng_state()
    how, x = CODECS["weights", "bf16_stochastic"], torch.randn(50, generator=torch.Generator())
    how.encode(x, torch.Generator().manual_seed(1))
    assert torch.equal(before, torch.get_rng_state())


def test_kahan_pair_remembers_sixteen_bits():
    how = CODECS["weights", "bf16_kahan"]
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    parts = how.encode(x)
    assert ((how.decode(parts, x.shape) - x).abs() <= x.abs() * 2**-8).all()
    assert parts[0].dtype == parts[1].dtype == torch.bfloat16
    assert ((how.exact(parts, x.shape) - x).abs() <= x.abs() * 2**-16).all()


@pytest.mark.parametrize("beta", [0.999, 0.95])
@pytest.mark.parametrize(("what", "name"), [k for k in CODECS if k[0] == "exp_avg_sq" and k[1] != "fp16_tensor"])
def test_a_moving_average_does_not_stall(what, name, beta):
    """The reason power-of-two scales are refused for state: after warm-up the stored average follows the true one."""
    how, generator = CODECS[what, name], torch.Generator().manual_seed(0)
    stored = exact = torch.zeros(1024)
    for _ in range(int(4 / (1 - beta))):
        square = torch.randn(1024, generator=generator).square()
        exact = exact * beta + square * (1 - beta)
        stored = how.decode(how.encode(stored * beta + square * (1 - beta), generator), stored.shape)
    assert 0.9 < float(stored.mean() / exact.mean()) < 1.1


@pytest.mark.parametrize("key", list(CODECS), ids="/".join)
def test_bits_are_what_the_parts_hold(key):
    how, x = CODECS[key], torch.rand(1 << 16)
    held = sum(part.numel() * part.element_size() for part in how.encode(x))
    assert held * 8 / x.numel() == pytest.approx(how.bits, rel=1e-3)


def test_codec_by_name():
    assert codec("exp_avg", "fp32") is None
    assert codec("exp_avg", "e4m3") is CODECS["exp_avg", "e4m3"]
    named = {(part, name) for part, held in OptimizerPolicy.model_fields.items() for name in get_args(held.annotation)}
    assert {(part, name) for part, name in named if part not in STEPPING and name != "fp32"} == set(CODECS)


@pytest.mark.parametrize("count", [2, 3, 256])
def test_codes_are_looked_up_alike_one_by_one_and_in_pairs(count: int) -> None:
    codes = torch.arange(256, dtype=torch.uint8).roll(-1)[:count].repeat(2)
    expected = _dynamic_map(codes.device)[0][codes.int()]
    for start in range(3):
        assert torch.equal(_look_up(codes[start:]), expected[start:])
