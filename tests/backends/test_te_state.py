"""Transformer Engine's global state, entered once and left as it was found, against a stand-in of its state machine."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from autoprec.backends.te_state import EngineState, delayed_buffers
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
