"""Transformer Engine's global state, entered once and left as it was found, against a stand-in of its state machine."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from autoprec.backends.te_state import DelayedMemory, EngineState, delayed_buffers
from tests.backends import fake_te


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
