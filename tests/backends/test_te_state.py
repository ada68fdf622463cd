"""Transformer Engine's global state, entered once and left as it was found, against a stand-in of its state machine."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from autoprec.backends.te_state import DelayedMemory, EngineAttention, EngineState, delayed_buffers
from autoprec.errors import UnsupportedError
from tests.backends import fake_te
from tests.backends.fake_te import UPDATES, DotProductAttention


@pytest.fixture
def state(monkeypatch: pytest.MonkeyPatch) -> EngineState:
    fake_te.install(monkeypatch)
    made = EngineState("a test")
    made.start_over()
    return made


def test_what_encloses_a_recipe_already_is_not_entered_again(state: EngineState) -> None:
    recipe = fake_te.DelayedScaling()
    with state.entered(recipe):
        assert state.manager.get_fp8_recipe() is recipe
        with state.entered(recipe):
            assert state.manager.is_fp8_enabled()
        assert state.manager.is_fp8_enabled()
    assert not state.manager.is_fp8_enabled()


def test_backward_scales_are_updated_when_the_next_training_forward_begins(
    state: EngineState, monkeypatch: pytest.MonkeyPatch
) -> None:
    updates: list[bool] = []
    monkeypatch.setattr(state.manager, "reduce_and_update_fp8_tensors", lambda forward=True: updates.append(forward))
    out = torch.ones(2, requires_grad=True) * 2
    state.watch(out)
    assert not state.backward_seen
    out.sum().backward()
    assert state.backward_seen
    with torch.no_grad(), state.entered(fake_te.DelayedScaling()):
        pass
    assert False not in updates  # evaluation updates no backward scale
    with state.entered(fake_te.DelayedScaling()):
        pass
    assert updates.count(False) == 1
    assert not state.backward_seen


def test_a_recomputed_forward_sees_the_first_ones_scale_and_leaves_no_trace(state: EngineState) -> None:
    held = SimpleNamespace(scale=torch.tensor([8.0]), amax_history=torch.tensor([[3.0]]))
    shell = SimpleNamespace(fp8_meta={"scaling_fwd": held})

    def recompute() -> None:
        with state.repeated(fake_te.DelayedScaling(), shell, torch.tensor([2.0])):  # type: ignore[arg-type]
            assert held.scale == 2.0
            held.amax_history.fill_(99.0)
            raise KeyError  # checkpointing stops early

    with pytest.raises(KeyError):
        recompute()
    assert (held.scale.item(), held.amax_history.item()) == (8.0, 3.0)


def test_a_module_without_delayed_scales_has_no_buffers() -> None:
    assert delayed_buffers(SimpleNamespace(fp8_meta={})) is None


def held(columns: int, value: float) -> SimpleNamespace:
    return SimpleNamespace(scale=torch.full((columns,), value), amax_history=torch.full((4, columns), value))


def test_histories_are_saved_with_shapes_of_the_recipe_and_come_back_before_the_first_forward() -> None:
    shell = SimpleNamespace(fp8_meta={})
    memory, cpu = DelayedMemory(shell, 4), torch.device("cpu")
    empty = memory.state(cpu)
    assert {name: tuple(value.shape) for name, value in empty.items()} == {
        "forward.scale": (3,),
        "forward.history": (4, 3),
        "backward.scale": (2,),
        "backward.history": (4, 2),
    }
    shell.fp8_meta = {"scaling_fwd": held(2, 5.0), "scaling_bwd": held(1, 7.0)}  # as under a custom recipe
    saved = memory.state(cpu)
    assert saved["forward.scale"].tolist() == [5.0, 5.0, 1.0]
    assert {name: value.shape for name, value in saved.items()} == {name: value.shape for name, value in empty.items()}

    other = SimpleNamespace(fp8_meta={})

    def made(num_gemms: int) -> None:
        assert num_gemms == 1
        other.fp8_meta = {"scaling_fwd": held(2, 1.0), "scaling_bwd": held(1, 1.0)}

    other.init_fp8_metadata = made
    again = DelayedMemory(other, 4)
    again.load(saved)
    assert all(torch.equal(a, b) for a, b in zip(again.state(cpu).values(), saved.values(), strict=True))
    again.restore()
    again.restore()  # once only
    assert again.pending is None
    assert other.fp8_meta["scaling_fwd"].scale.tolist() == [5.0, 5.0]
    assert other.fp8_meta["scaling_bwd"].amax_history.unique().tolist() == [7.0]


# --- attention --------------------------------------------------------------------------------------------------------


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
