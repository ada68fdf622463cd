"""The guard sees what goes wrong, falls back in order, and never ends a training."""

from __future__ import annotations

import itertools
import logging
import math
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from autoprec.applying.guard import Breach, Guard, watch
from autoprec.applying.policy import apply_policy
from autoprec.applying.swap import execution_of
from autoprec.policy import Phase, Policy
from autoprec.policy.phases import plain_recipe
from tests.applying.guard.helpers import formats_of, make_model, make_policy


def _run(guard: Guard, losses: list[float], norms: list[float] | None = None) -> list[Breach]:
    found = [guard.step(loss, norms[i] if norms else None) for i, loss in enumerate(losses)]
    return [breach for breach in found if breach is not None]


def test_a_rising_loss_falls_back_in_the_policys_order() -> None:
    model, seen = make_model(), []
    policy = make_policy(metrics=("loss_gap",), thresholds={"loss_gap": 0.05}, fallback=("wgrad_bf16", "script"))
    apply_policy(policy, model, backend="emulated")
    guard = Guard(policy, model, every=5, patience=2, window=20, backend="emulated", on_breach=seen.append)
    breaches = _run(guard, [1.0] * 40 + [1.5] * 120)
    assert [breach.action for breach in breaches] == ["wgrad_bf16", "script", *["none left"] * (len(breaches) - 2)]
    assert seen == breaches
    assert breaches[0].metric == "loss_gap"
    assert breaches[0].value == pytest.approx(0.5)
    assert all(execution_of(module) is None for module in model.modules())


def test_a_fallback_is_given_time() -> None:
    model = make_model()
    policy = make_policy(metrics=("loss_gap",), thresholds={"loss_gap": 0.05})
    apply_policy(policy, model, backend="emulated")
    guard = Guard(policy, model, every=5, patience=1, window=50, backend="emulated")
    breaches = _run(guard, [1.0] * 20 + [2.0] * 100)
    assert all(later.step - earlier.step >= 50 for earlier, later in itertools.pairwise(breaches))


def test_the_model_really_runs_the_fallback() -> None:
    model = make_model()
    policy = make_policy(fallback=("wgrad_bf16",))
    apply_policy(policy, model, backend="emulated")
    guard = Guard(policy, model, every=5, patience=1, backend="emulated")
    _run(guard, [1.0] * 10 + [9.0] * 20)
    model(torch.randn(16, 32)).sum().backward()
    executed = execution_of(model[0]).executed
    assert executed["wgrad"] == "bf16"
    assert executed["fprop"].startswith("fp8")


def test_a_falling_noisy_loss_is_no_breach() -> None:
    generator = torch.Generator().manual_seed(0)
    noise = (torch.randn(600, generator=generator) * 0.02).tolist()
    guard = Guard(make_policy(thresholds={"loss_gap": 0.05}, metrics=("loss_gap",)))
    assert _run(guard, [4 * math.exp(-i / 300) * (1 + noise[i]) for i in range(600)]) == []


def test_batch_noise_is_no_breach() -> None:
    generator = torch.Generator().manual_seed(0)
    losses = (1 + torch.randn(4000, generator=generator) * 0.3).tolist()
    assert _run(Guard(make_policy(thresholds={"loss_gap": 0.02}, metrics=("loss_gap",))), losses) == []


def test_exploding_gradients_and_nan_losses_are_seen() -> None:
    guard = Guard(make_policy(thresholds={"gradient_norm_ratio": 3.0}, metrics=("gradient_norm_ratio",)), patience=1)
    assert _run(guard, [1.0] * 100, [1.0] * 80 + [50.0] * 20)[0].metric == "gradient_norm_ratio"
    guard = Guard(make_policy(thresholds={"nonfinite_steps": 2.0}, metrics=("nonfinite_steps",)))
    assert _run(guard, [1.0] * 15 + [math.nan] * 3 + [1.0] * 2)[0].metric == "nonfinite_steps"


def test_a_guard_that_fails_does_not_end_the_training(caplog: pytest.LogCaptureFixture) -> None:
    guard = Guard(make_policy(), every=1)
    with caplog.at_level(logging.ERROR):
        assert guard.step("no number") is None  # type: ignore[arg-type]
    assert "looks away" in caplog.text


def test_breaches_reach_the_active_mlflow_run_and_its_failure_is_survived(monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[Any] = []

    def fail(_tags: dict[str, str]) -> None:
        raise OSError("gone")

    fake = SimpleNamespace(
        active_run=lambda: object(), log_metrics=lambda m, step: logged.append((step, m)), set_tags=fail
    )
    monkeypatch.setitem(sys.modules, "mlflow", fake)
    guard = Guard(make_policy(metrics=("loss_gap",), thresholds={"loss_gap": 0.1}), every=5, patience=1)
    breaches = _run(guard, [1.0] * 20 + [2.0] * 20)
    assert breaches
    assert any("guard/loss_gap" in metrics for _, metrics in logged)
    assert any("guard/fallbacks" in metrics for _, metrics in logged)


def test_only_an_open_run_is_logged_to_and_only_what_is_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []
    module = SimpleNamespace(active_run=lambda: None, log_metrics=lambda values, step: seen.append((values, step)))
    monkeypatch.setitem(sys.modules, "mlflow", module)
    watch._log_to_active_run({"a": 1.0}, 3)
    assert seen == []
    module.active_run = lambda: "run"
    watch._log_to_active_run({"a": 1.0, "b": math.nan}, 3)
    assert seen == [({"a": 1.0}, 3)]


def test_a_resumed_run_keeps_its_fallbacks() -> None:
    model = make_model()
    policy = make_policy(fallback=("all_bf16", "script"))
    apply_policy(policy, model, backend="emulated")
    guard = Guard(policy, model, every=5, patience=1, backend="emulated")
    _run(guard, [1.0] * 10 + [9.0] * 10)
    state = guard.state_dict()
    other = make_model()
    apply_policy(policy, other, backend="emulated")
    resumed = Guard(policy, other, backend="emulated")
    resumed.load_state_dict(state)
    assert resumed.fallbacks == ["script"]
    other(torch.randn(4, 32)).sum().backward()
    assert execution_of(other[0]).executed["fprop"] == "bf16"


def test_a_fallback_stays() -> None:
    model = make_model()
    policy = make_policy(metrics=("loss_gap",), thresholds={"loss_gap": 0.05}, fallback=("wgrad_bf16", "all_bf16"))
    apply_policy(policy, model, backend="emulated")
    guard = Guard(policy, model, every=5, patience=2, window=20, backend="emulated")
    _run(guard, [1.0] * 30 + [2.0] * 15 + [1.0] * 300)
    assert [breach.action for breach in guard.breaches] == ["wgrad_bf16"]
    assert formats_of(guard.policy) == ["bf16"] * 3
    older = guard.state_dict() | {"recoveries": [], "undo": [("wgrad_bf16", policy.to_dict())], "calm": (0, 0)}
    resumed = Guard(policy, model, backend="emulated")
    resumed.load_state_dict(older)
    assert formats_of(resumed.policy) == ["bf16"] * 3, "a checkpoint of an earlier version"


def test_a_policy_with_phases_falls_back_in_each_of_them_and_keeps_their_boundaries() -> None:
    model = make_model()
    policy = make_policy(metrics=("loss_gap",), thresholds={"loss_gap": 0.05}, fallback=("wgrad_bf16",))
    plain, recipes = plain_recipe(policy)
    last = Phase.model_validate({"from": 0.85, "layers": ({"match": "*", "recipe": plain},)})
    policy = policy.model_copy(update={"recipes": recipes, "phases": (last,)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    guard = Guard(policy, model, every=5, patience=1, window=20, backend="emulated", run_steps=100)
    ran = []
    for step in range(100):
        model(torch.randn(4, 32)).sum().backward()
        optimizer.step()
        guard.step(9.0 if step > 40 else 1.0)
        ran.append(execution_of(model[0]).plan.describe())
    assert [text.split()[0] for text in dict.fromkeys(ran)] == ["fp8", "fprop:", "bf16"]
    assert ran.index("bf16") in (84, 85)


def test_a_jump_is_acted_on_between_two_looks() -> None:
    guard = Guard(Policy(), every=50, window=100)
    found = [guard.step(2.0 + 0.01 * (step % 3) if step < 125 else 2.6) for step in range(140)]
    steps = [breach.step for breach in found if breach is not None]
    assert steps == [128]  # the third of the four last losses that lie above
    assert guard.breaches[0].metric == "loss_gap"
    assert guard.breaches[0].value == pytest.approx(0.29, abs=0.02)


def test_nothing_on_a_device_is_asked_for_between_two_looks(caplog: pytest.LogCaptureFixture) -> None:
    """A loss as a number beside a gradient norm that still lies on the device: it waits there for the next look."""
    guard = Guard(Policy(), every=50)
    for _ in range(49):
        guard.step(2.0, torch.ones((), device="meta"))  # a meta tensor has no value to bring to the host
    assert len(guard._pending) == 49
    assert not caplog.records
