"""Which lines cast a model, made an optimizer, and what was loaded."""

import pytest
import torch
from torch import nn

from autoprec.trial.inside.observe.hooks import Hooks


@pytest.fixture
def hooks():
    made = Hooks()
    made.install()
    yield made
    made.remove()


@pytest.mark.parametrize(
    ("cast", "dtype"),
    [
        (lambda m: m.half(), "fp16"),
        (lambda m: m.bfloat16(), "bf16"),
        (lambda m: m.to(torch.bfloat16), "bf16"),
        (lambda m: m.to(dtype=torch.float16), "fp16"),
        (lambda m: m.to("cpu", torch.bfloat16), "bf16"),
        (lambda m: m.float(), ""),
        (lambda m: m.to("cpu"), ""),
        (lambda m: m.double(), "fp64"),
        (lambda m: m.to(torch.float64), "fp64"),
    ],
)
def test_the_line_of_a_cast_to_16_or_64_bits_is_known(hooks, cast, dtype) -> None:
    assert cast(model := nn.Linear(2, 2)) is model
    assert [to for _, to in hooks.sources.casts] == [dtype] * bool(dtype)
    assert all(where.startswith(__file__) for where, _ in hooks.sources.casts)


@pytest.mark.parametrize(
    ("dtype", "kept"), [(torch.bfloat16, ["bf16"]), (torch.float16, ["fp16"]), (torch.float64, ["fp64"])]
)
def test_the_line_of_a_default_dtype_is_known(hooks, dtype, kept) -> None:
    try:
        torch.set_default_dtype(dtype)
        assert nn.Linear(2, 2).weight.dtype is dtype
    finally:
        torch.set_default_dtype(torch.float32)
    assert [to for _, to in hooks.sources.casts] == kept
    assert all(where.startswith(__file__) for where, _ in hooks.sources.casts)


def test_optimizers_and_loaded_weights(hooks) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    assert hooks.sources.of(optimizer).startswith(__file__)
    assert hooks.sources.of(torch.optim.SGD(model.parameters())) != ""
    model.load_state_dict({"weight": torch.ones(2, 2).bfloat16(), "bias": torch.ones(2)})
    assert hooks.sources.loaded == {"weight": "bf16", "bias": "fp32"}
    hooks.remove()
    assert hooks.sources.of(torch.optim.SGD(model.parameters())) == ""
