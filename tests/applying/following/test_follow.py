"""A run that is followed computes the same bits until something is changed, and what is changed helps."""

from __future__ import annotations

import logging
import sys
import types
from typing import Any

import pytest
import torch

from autoprec.applying.following import following_of
from autoprec.applying.guard import Guard
from autoprec.applying.raw_weights import unit_execution
from autoprec.applying.units import tunable_units
from autoprec.errors import UsageError
from autoprec.trial.session import Session
from tests.applying.following.helpers import DELAYED, FP8, Training, followed


def scaled(model: torch.nn.Module) -> list[str]:
    """Return the layers that run in FP8 now."""
    runs = {name: unit_execution(unit) for name, unit in tunable_units(model).items()}
    return [name for name, run in runs.items() if run is not None and run.plan.scaled]


def run(policy: Any, steps: int, follow: int | None, **options: Any) -> tuple[list[float], Training]:
    training = Training()
    policy.apply(training.model, backend="emulated", follow=follow, **options)
    return [training.step() for _ in range(steps)], training


@pytest.mark.parametrize("recipe", [FP8, DELAYED, {"format": "nvfp4", "stochastic_rounding": True}])
def test_a_run_in_which_nothing_changes_computes_the_same_bits(recipe: dict[str, Any]) -> None:
    # an error in the table far from the true one: groups are asked alone, too
    policy = followed(recipe, error=0.001)
    policy = policy.model_copy(update={"follow": policy.follow.model_copy(update={"max_gradient_error": 10.0})})
    (plain, one), (losses, two) = run(policy, 22, None), run(policy, 22, 10)
    following = following_of(two.model)
    assert [look.step for look in following.looks] == [10, 20]
    assert following.looks[0].passes > 2
    assert all(not look.change for look in following.looks)
    assert losses == plain
    assert float(one.total) == float(two.total)
    assert one.model.calls == two.model.calls == 22
    for (name, value), (_, other) in zip(one.model.state_dict().items(), two.model.state_dict().items(), strict=True):
        assert torch.equal(value, other), name
    moments = [training.optimizer.state_dict()["state"][0]["exp_avg"] for training in (one, two)]
    assert torch.equal(*moments)


def test_a_layer_that_becomes_sensitive_leaves_fp8_alone_and_comes_back(caplog: pytest.LogCaptureFixture) -> None:
    mlflow = types.SimpleNamespace(tags={}, metrics=[], active_run=lambda: True)
    mlflow.log_metrics = lambda metrics, step: mlflow.metrics.append((step, metrics))
    mlflow.set_tags = mlflow.tags.update
    told: list[str] = []
    training = Training()
    policy = followed()
    policy.apply(training.model, backend="emulated", follow="every=10", on_change=told.append)
    following = following_of(training.model)
    with pytest.MonkeyPatch.context() as patch, caplog.at_level(logging.INFO, "autoprec.following"):
        patch.setitem(sys.modules, "mlflow", mlflow)
        for step in range(80):
            training.model.outlier = 1e6 if 15 <= step < 45 else 0.0
            if step == 44:
                assert "layers.1" not in scaled(training.model)
                assert scaled(training.model), "the others are not to blame"
                assert policy.audit(training.model).ok
            training.step()
    assert "layers.1: fp8 -> keep" in told[0]
    assert "over the limit" in told[0]
    assert any("layers.1: keep -> fp8" in line for line in told[1:])
    assert list(mlflow.tags.values()) == told
    assert {"follow/gradient_error", "follow/limit", "follow/share"} == mlflow.metrics[0][1].keys()
    assert all(look.passes <= 8 for look in following.looks)


def test_a_phase_in_16_bits_is_left_alone_and_the_one_before_it_is_followed() -> None:
    phases = [{"from": 25, "layers": [{"match": "*", "recipe": "keep"}]}]
    _, training = run(followed(phases=phases, error=1e-4), 45, 10)
    following = following_of(training.model)
    assert [look.step for look in following.looks] == [10, 20]
    assert scaled(training.model) == []


def test_the_guard_follows_and_following_waits_while_a_fallback_is_in_force() -> None:
    training = Training()
    policy = followed()
    policy.apply(training.model, backend="emulated")
    guard = Guard(policy, training.model, follow="every=10", backend="emulated")
    following = following_of(training.model)
    training.model.outlier = 1e6
    for _ in range(22):  # the second time over the limit counts in any case
        guard.step(training.step())
    assert "layers.1" not in scaled(training.model)
    assert guard.policy is following.policy
    other = Guard(policy, Training().model, follow=10)
    other.load_state_dict(guard.state_dict())
    assert scaled(other.model) == scaled(training.model)
    assert guard._apply("all_bf16")
    assert following.paused
    looked = len(following.looks)
    for _ in range(10):
        guard.step(training.step())
    assert len(following.looks) == looked
    guard._come_back()
    assert not following.paused
    assert scaled(training.model)


def test_what_cannot_be_followed_is_refused() -> None:
    training = Training()
    with pytest.raises(UsageError, match="does not record"):
        followed(follow=None).apply(training.model, follow=10)
    with pytest.raises(UsageError, match="every=500"):
        followed().apply(training.model, follow="each=500")
    with pytest.raises(UsageError, match="every=500"):
        followed().apply(training.model, follow=2)
    with pytest.raises(UsageError, match="does not list"):
        followed(layers=[{"match": "*", "recipe": "fp8", "gemms": {"wgrad": "keep"}}]).apply(training.model, follow=10)
    with pytest.raises(UsageError, match="optimizer"):
        Session(training.model, policy=followed(), follow=10)
    with pytest.raises(UsageError, match="model"):
        Guard(followed(), follow=10)
    training.model.head.weight.register_post_accumulate_grad_hook(lambda p: None)
    with pytest.raises(UsageError, match="during backward"):
        followed().apply(training.model, follow=10)


def test_a_look_that_fails_ends_the_following_and_not_the_training() -> None:
    class Auxiliary(torch.nn.Module):
        def __init__(self, inner: torch.nn.Module) -> None:
            super().__init__()
            self.inner, self.aux = inner, torch.zeros(())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = self.inner(x)
            self.aux = out.square().mean()  # taken from the module by the script: not on the tape
            return out

    training = Training()
    model = Auxiliary(training.model)
    policy = followed()
    names = [f"inner.layers.{i}" for i in range(3)]
    groups = [g.model_copy(update={"layers": (n,)}) for g, n in zip(policy.follow.groups, names, strict=True)]
    policy = policy.model_copy(
        update={
            "follow": policy.follow.model_copy(update={"groups": tuple(groups)}),
            "layers": tuple(r.model_copy(update={"match": "inner.layers.*"}) for r in policy.layers),
        }
    )
    policy.apply(model, backend="emulated", follow=5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step() -> None:
        loss = model(torch.randn(8, 16)).square().mean() + model.aux
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    for _ in range(4):
        step()
    with pytest.warns(UserWarning, match="not followed any more"):
        step()
    for _ in range(6):
        step()
    assert scaled(model) == names
    assert following_of(model).looks == []


def test_nothing_is_changed_right_before_the_end_of_a_run() -> None:
    """Weights adapt to the precision they are trained in; a last look would leave them no steps to adapt again."""
    _, training = run(followed(), 20, 10, run_steps=20)
    assert [look.step for look in following_of(training.model).looks] == [10]


@pytest.mark.parametrize("weight", [0.0, float("inf")])
def test_a_step_without_a_gradient_to_compare_with_changes_nothing(weight: float) -> None:
    """A batch that is masked out, or an overflow: the policy is not to blame."""
    training = Training()
    followed(error=0.01).apply(training.model, backend="emulated", follow=10)
    for step in range(10):
        training.weight = weight if step == 9 else 1.0
        training.step()
    (look,) = following_of(training.model).looks
    assert not look.change
    assert look.passes == 1
    assert "gradient of this step" in look.reason
    assert len(scaled(training.model)) == 3
