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
from torch import nn

from autoprec.applying.guard import FALLBACKS, Breach, Guard, fall_back
from autoprec.applying.policy import Policy, apply_policy
from autoprec.applying.swap import execution_of
from autoprec.errors import UnknownNameError
from autoprec.policy import Guard as GuardSection
from autoprec.policy import policy_from_dict, resolve
from autoprec.precision.recipes import BUILTIN_RECIPES

LAYERS = ["0", "2", "4"]


def _policy(recipe: str = "fp8_tensorwise", **section: Any) -> Policy:
    recipes = {recipe: BUILTIN_RECIPES[recipe].to_dict()}
    document = {"schema": "autoprec.policy/1", "recipes": recipes, "layers": [{"match": "*", "recipe": recipe}]}
    policy = policy_from_dict(document, cls=Policy)
    return policy.model_copy(update={"guard": GuardSection(**section)}) if section else policy


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 16))


def _formats(policy: Any, gemm: str = "wgrad") -> list[str]:
    plans = resolve(policy, LAYERS, strict=False)
    return ["keep" if (r := plans[name].recipe(gemm)) is None else r.format for name in LAYERS]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "fprop", "wgrad"),
    [
        ("wgrad_bf16", ["fp8"] * 3, ["bf16"] * 3),
        ("head_bf16", ["fp8", "fp8", "bf16"], ["fp8", "fp8", "bf16"]),
        ("ends_bf16", ["bf16", "fp8", "bf16"], ["bf16", "fp8", "bf16"]),
        ("all_bf16", ["bf16"] * 3, ["bf16"] * 3),
        ("script", ["keep"] * 3, ["keep"] * 3),
    ],
)
def test_fallbacks(name: str, fprop: list[str], wgrad: list[str]) -> None:
    following = fall_back(_policy(), name, LAYERS)
    assert (_formats(following, "fprop"), _formats(following)) == (fprop, wgrad)
    assert following.to_dict()  # it can be written


def test_fallbacks_add_up() -> None:
    policy: Any = _policy()
    for name in FALLBACKS:
        policy = fall_back(policy, name, LAYERS)
    assert policy.layers == ()
    with pytest.raises(UnknownNameError, match="head_bf16"):
        fall_back(_policy(), "haed_bf16", LAYERS)


def test_the_default_recipe_falls_back_too() -> None:
    policy = _policy().model_copy(update={"layers": (), "default": "fp8_tensorwise"})
    assert _formats(fall_back(policy, "wgrad_bf16", LAYERS)) == ["bf16"] * 3


def _run(guard: Guard, losses: list[float], norms: list[float] | None = None) -> list[Breach]:
    found = [guard.step(loss, norms[i] if norms else None) for i, loss in enumerate(losses)]
    return [breach for breach in found if breach is not None]


def test_a_rising_loss_falls_back_in_the_policys_order() -> None:
    model, seen = _model(), []
    policy = _policy(metrics=("loss_gap",), thresholds={"loss_gap": 0.05}, fallback=("wgrad_bf16", "script"))
    apply_policy(policy, model, backend="emulated")
    guard = Guard(policy, model, every=5, patience=2, window=20, backend="emulated", on_breach=seen.append)
    breaches = _run(guard, [1.0] * 40 + [1.5] * 120)
    assert [breach.action for breach in breaches] == ["wgrad_bf16", "script", *["none left"] * (len(breaches) - 2)]
    assert seen == breaches
    assert breaches[0].metric == "loss_gap"
    assert breaches[0].value == pytest.approx(0.5)
    assert all(execution_of(module) is None for module in model.modules())


def test_a_fallback_is_given_time() -> None:
    model = _model()
    policy = _policy(metrics=("loss_gap",), thresholds={"loss_gap": 0.05})
    apply_policy(policy, model, backend="emulated")
    guard = Guard(policy, model, every=5, patience=1, window=50, backend="emulated")
    breaches = _run(guard, [1.0] * 20 + [2.0] * 100)
    assert all(later.step - earlier.step >= 50 for earlier, later in itertools.pairwise(breaches))


def test_the_model_really_runs_the_fallback() -> None:
    model = _model()
    policy = _policy(fallback=("wgrad_bf16",))
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
    guard = Guard(_policy(thresholds={"loss_gap": 0.05}, metrics=("loss_gap",)))
    assert _run(guard, [4 * math.exp(-i / 300) * (1 + noise[i]) for i in range(600)]) == []


def test_batch_noise_is_no_breach() -> None:
    generator = torch.Generator().manual_seed(0)
    losses = (1 + torch.randn(4000, generator=generator) * 0.3).tolist()
    assert _run(Guard(_policy(thresholds={"loss_gap": 0.02}, metrics=("loss_gap",))), losses) == []


def test_a_reference_curve_replaces_the_own_trend() -> None:
    reference = [2.0 * math.exp(-i / 100) for i in range(400)]
    guard = Guard(_policy(thresholds={"loss_gap": 0.05}, metrics=("loss_gap",)), reference=reference)
    breaches = _run(guard, [loss * (1.0 if i < 200 else 1.2) for i, loss in enumerate(reference)])
    assert breaches
    assert breaches[0].step > 200
    assert breaches[0].action == "none left"  # without a model it can only warn


def test_exploding_gradients_and_nan_losses_are_seen() -> None:
    guard = Guard(_policy(thresholds={"gradient_norm_ratio": 3.0}, metrics=("gradient_norm_ratio",)), patience=1)
    assert _run(guard, [1.0] * 100, [1.0] * 80 + [50.0] * 20)[0].metric == "gradient_norm_ratio"
    guard = Guard(_policy(thresholds={"nonfinite_steps": 2.0}, metrics=("nonfinite_steps",)))
    assert _run(guard, [1.0] * 15 + [math.nan] * 3 + [1.0] * 2)[0].metric == "nonfinite_steps"


def test_underflow_of_sampled_gradients_is_seen() -> None:
    model = _model()
    policy = _policy(
        "fp8_delayed", metrics=("underflow_share",), thresholds={"underflow_share": 0.5}, fallback=("all_bf16",)
    )
    apply_policy(policy, model, backend="emulated")
    guard = Guard(policy, model, every=2, patience=1, backend="emulated")
    breaches = []
    for step in range(12):
        x = torch.randn(8, 32)
        loss = (model(x) * (1.0 if step < 6 else 1e-12)).sum()
        model.zero_grad()
        loss.backward()
        breaches += [breach] if (breach := guard.step(loss)) else []
    assert [(b.metric, b.action) for b in breaches] == [("underflow_share", "all_bf16")]
    assert breaches[0].step > 6
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_saturation_of_a_stale_scale_is_seen() -> None:
    model = _model()
    policy = _policy("fp8_delayed", metrics=("saturated_share",), thresholds={"saturated_share": 0.01})
    apply_policy(policy, model, backend="emulated")
    guard = Guard(policy, model, every=2, backend="emulated")
    for step in range(8):
        loss = model(torch.randn(8, 32) * (1000.0 if step == 7 else 1.0)).sum()
        loss.backward()
        guard.step(loss)
    assert guard.values["saturated_share"] > 0.5


def test_healthy_values_are_reported() -> None:
    model = _model()
    policy = _policy()
    apply_policy(policy, model, backend="emulated")
    guard = Guard(policy, model, every=2)
    for _ in range(4):
        loss = model(torch.randn(8, 32)).square().mean()
        loss.backward()
        assert guard.step(loss) is None
    assert guard.values["saturated_share"] == 0.0
    assert guard.values["underflow_share"] < 0.5


def test_a_guard_that_fails_does_not_end_the_training(caplog: pytest.LogCaptureFixture) -> None:
    guard = Guard(_policy(), every=1)
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
    guard = Guard(_policy(metrics=("loss_gap",), thresholds={"loss_gap": 0.1}), every=5, patience=1)
    breaches = _run(guard, [1.0] * 20 + [2.0] * 20)
    assert breaches
    assert any("guard/loss_gap" in metrics for _, metrics in logged)
    assert any("guard/fallbacks" in metrics for _, metrics in logged)


def test_a_resumed_run_keeps_its_fallbacks() -> None:
    model = _model()
    policy = _policy(fallback=("all_bf16", "script"))
    apply_policy(policy, model, backend="emulated")
    guard = Guard(policy, model, every=5, patience=1, backend="emulated")
    _run(guard, [1.0] * 10 + [9.0] * 10)
    state = guard.state_dict()
    other = _model()
    apply_policy(policy, other, backend="emulated")
    resumed = Guard(policy, other, backend="emulated")
    resumed.load_state_dict(state)
    assert resumed.fallbacks == ["script"]
    other(torch.randn(4, 32)).sum().backward()
    assert execution_of(other[0]).executed["fprop"] == "bf16"
