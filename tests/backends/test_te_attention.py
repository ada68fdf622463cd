"""FP8 attention by Transformer Engine, by a stand-in: modules by the order of calls, one context, no silent 16 bits."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from autoprec.backends.te_attention import EngineAttention
from autoprec.backends.te_state import EngineState
from autoprec.errors import UnsupportedError
from tests.backends import fake_te
from tests.backends.fake_te import UPDATES, DotProductAttention


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> EngineAttention:
    fake_te.install(monkeypatch)
    return EngineAttention(EngineState("a test"), "a test")


def heads(count: int = 2, length: int = 8, size: int = 32) -> Tensor:
    return torch.randn(1, count, length, size, dtype=torch.bfloat16, requires_grad=True)


def test_each_call_of_a_forward_has_its_own_module_and_keeps_it(engine: EngineAttention) -> None:
    q = heads()
    for _ in range(2):
        engine.begin()
        for causal in (True, False):
            out = engine.run(q, q, q, causal=causal, scale=0.25)
            assert out.shape == q.shape
    assert [module.mask for module in DotProductAttention.built] == ["causal", "no_mask"]
    assert DotProductAttention.built[0].scale == 0.25
    recipe = engine.recipe
    assert (recipe.amax_history_len, recipe.amax_compute_algo, recipe.fp8_dpa) == (1, "most_recent", True)


def test_other_shapes_at_the_same_place_have_a_module_of_their_own(engine: EngineAttention) -> None:
    for query, key in ((heads(4), heads(2)), (heads(4), heads(4)), (heads(4, 8), heads(4, 6))):
        engine.begin()
        engine.run(query, key, key, causal=False, scale=1.0)
    assert [module.groups for module in DotProductAttention.built] == [2, 4, 4]


def test_inside_the_context_of_the_forward_scales_are_updated_once(engine: EngineAttention) -> None:
    q = heads()
    with engine._state.entered(engine.recipe):
        for _ in range(2):
            out = engine.run(q, q, q, causal=True, scale=1.0)
    assert UPDATES == [True]
    out.sum().backward()  # type: ignore[no-untyped-call]
    engine._state.settle()
    assert UPDATES == [True, False]


def test_what_transformer_engine_refuses_is_told(engine: EngineAttention) -> None:
    q = heads(size=512)
    with pytest.raises(UnsupportedError, match="No dot product attention backend"):
        engine.run(q, q, q, causal=True, scale=1.0)


def test_sixteen_bits_are_not_passed_off_as_fp8(engine: EngineAttention, monkeypatch: pytest.MonkeyPatch) -> None:
    class In16(DotProductAttention):
        def forward(self, *operands: Tensor) -> Tensor:
            out = super().forward(*operands)
            self.fp8_meta = {"recipe": fake_te.DelayedScaling()}
            return out

    monkeypatch.setattr(engine._state.te, "DotProductAttention", In16)
    q = heads()
    with pytest.raises(UnsupportedError, match="NVTE_DPA_FP8_RECIPE"):
        engine.run(q, q, q, causal=True, scale=1.0)


def test_a_call_that_is_repeated_in_backward_is_refused(engine: EngineAttention) -> None:
    q = heads()
    x = torch.ones(1, requires_grad=True)
    y = x * 2
    y.register_hook(lambda _grad: engine.run(q, q, q, causal=True, scale=1.0))
    with pytest.raises(UnsupportedError, match="activation checkpointing"):
        y.backward()  # type: ignore[no-untyped-call]


def test_a_copy_of_a_model_runs_by_the_same_modules(engine: EngineAttention) -> None:
    assert copy.deepcopy({"one": engine})["one"] is engine


@pytest.mark.filterwarnings("ignore")  # the own deprecations of Dynamo and Inductor
def test_in_a_compiled_function_it_runs_between_the_graphs(engine: EngineAttention) -> None:
    q = heads()

    def doubled(q: Tensor) -> Any:
        return engine.run(q * 2, q, q, causal=True, scale=1.0) + 1

    engine.begin()
    eager = doubled(q)
    engine.begin()
    assert torch.equal(torch.compile(doubled)(q), eager)
    assert len(DotProductAttention.built) == 1
