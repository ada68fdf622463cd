"""What is counted inside a step: saturation and underflow of FP8 operands."""

from __future__ import annotations

import torch

from autoprec.applying.guard import Guard
from autoprec.applying.policy import apply_policy
from tests.applying.guard.helpers import make_model, make_policy


def test_underflow_of_sampled_gradients_is_seen() -> None:
    model = make_model()
    policy = make_policy(
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
    model = make_model()
    policy = make_policy("fp8_delayed", metrics=("saturated_share",), thresholds={"saturated_share": 0.01})
    apply_policy(policy, model, backend="emulated")
    guard = Guard(policy, model, every=2, backend="emulated")
    for step in range(8):
        loss = model(torch.randn(8, 32) * (1000.0 if step == 7 else 1.0)).sum()
        loss.backward()
        guard.step(loss)
    assert guard.values["saturated_share"] > 0.5


def test_healthy_values_are_reported() -> None:
    model = make_model()
    policy = make_policy()
    apply_policy(policy, model, backend="emulated")
    guard = Guard(policy, model, every=2)
    for _ in range(4):
        loss = model(torch.randn(8, 32)).square().mean()
        loss.backward()
        assert guard.step(loss) is None
    assert guard.values["saturated_share"] == 0.0
    assert guard.values["underflow_share"] < 0.5


def test_int8_is_sampled_too() -> None:
    model = make_model()
    policy = make_policy("int8_tensor", metrics=("underflow_share",), thresholds={"underflow_share": 1.0})
    apply_policy(policy, model)
    guard = Guard(policy, model, every=2)
    for _ in range(4):
        x = torch.randn(8, 32)
        x[0, 0] = 1e6  # one outlier takes a tensor's only scale
        loss = model(x).sum()
        loss.backward()
        guard.step(loss)
    assert guard.values["underflow_share"] > 0.5
