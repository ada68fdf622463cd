"""How far training and the copy that generates are apart, measured in a trial of a script that has both."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from autoprec.trial.inside.reporting import mismatch
from autoprec.trial.inside.reporting.mismatch import compare, logits_of
from autoprec.trial.losses import MISMATCH
from autoprec.trial.protocol import TrainSpec, TrialResult

KL, FLIPS = MISMATCH


def test_the_divergence_is_that_of_its_definition_and_flips_are_other_maxima(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    ours, theirs = torch.randn(50, 7, dtype=torch.float64), torch.randn(50, 7, dtype=torch.float64)
    expected = F.kl_div(theirs.log_softmax(-1), ours.softmax(-1), reduction="batchmean")
    flips = (ours.argmax(-1) != theirs.argmax(-1)).double().mean()
    assert compare(ours, theirs) == pytest.approx((float(expected), float(flips)))
    monkeypatch.setattr(mismatch, "_AT_ONCE", 21)  # three rows at once
    assert compare(ours, theirs) == pytest.approx((float(expected), float(flips)))
    assert compare(ours, ours) == (0.0, 0.0)


def test_what_is_masked_out_on_both_sides_has_no_share() -> None:
    ours = torch.tensor([[0.0, 1.0, -torch.inf]])
    assert compare(ours, ours + 0.5) == pytest.approx((0.0, 0.0), abs=1e-12)


@pytest.mark.parametrize("wrap", [
    lambda x: x, lambda x: SimpleNamespace(logits=x), lambda x: {"logits": x}, lambda x: (x, torch.zeros(())),
])  # fmt: skip
def test_logits_are_found_in_what_a_forward_returns(wrap: Any) -> None:
    x = torch.zeros(2, 3, 4)
    assert logits_of(wrap(x)) is x


@pytest.mark.parametrize("other", [torch.zeros(()), torch.zeros(2, 3, dtype=torch.int64), None, {"loss": 1}])
def test_anything_else_has_none(other: Any) -> None:
    assert logits_of(other) is None


# --- in a trial of a script ------------------------------------------------------------------------------------------
SIDE: dict[str, Any] = {"schema": "autoprec.policy/1", "recipes": {"bf16": {"format": "bf16"}}}


def run(host: Any, *arguments: str, metric: str = KL, **policy: Any) -> TrialResult:
    with host("rollout.py", *arguments) as runner:
        found = runner.run(TrainSpec(steps=5, warmup=2, metric=metric, policy=SIDE | policy if policy else None))
    assert isinstance(found, TrialResult)
    return found


def values(found: TrialResult) -> tuple[float, ...]:
    assert found.ok, found.reason + found.tail
    assert found.metric is not None
    assert found.metric.names == MISMATCH
    return found.metric.values


def test_a_trial_measures_both_sides_and_trains_as_it_would_without(host: Any) -> None:
    with host("rollout.py", "--dtype", "bfloat16") as runner:
        plain = runner.run(TrainSpec(steps=5, warmup=2))
        found = runner.run(TrainSpec(steps=5, warmup=2, metric=KL))
        flips = runner.run(TrainSpec(steps=5, warmup=2, metric=FLIPS))
    assert found.losses == flips.losses == plain.losses  # dropout draws what it would
    assert found.metric is not None
    assert found.metric.steps == (2, 3, 4, 5, 6, 7)
    assert all(1e-8 < value < 1e-3 for value in values(found))
    assert all(0.0 <= value < 0.2 for value in values(flips))


def test_equal_arithmetic_on_both_sides_is_no_mismatch_in_spite_of_dropout(host: Any) -> None:
    assert set(values(run(host))) == {0.0}
    assert set(values(run(host, "--returns", "object"))) == {0.0}


def test_the_copy_runs_under_the_autocast_that_the_script_runs_it_under(host: Any) -> None:
    assert all(value > 1e-8 for value in values(run(host, "--autocast")))


def test_the_copy_may_be_copied_and_saved_while_it_is_compared(host: Any) -> None:
    assert values(run(host, "--autocast", "--copies")) == values(run(host, "--autocast"))


def test_a_model_inside_a_wrapper_is_compared(host: Any) -> None:
    found = run(host, "--wrapped", rollout={"default": "bf16"})
    assert found.audit is not None
    assert found.audit["ok"]
    assert min(values(found)) > 1e-8


def test_the_only_copy_of_the_model_generates_without_being_named(host: Any) -> None:
    found = run(host, "--unnamed", rollout={"default": "bf16"})
    assert values(found) == values(run(host, rollout={"default": "bf16"}))
    assert found.metric is not None
    assert found.metric.source.endswith("the only other module with its parameters' names and shapes (Model)")


def test_only_equal_weights_are_compared(host: Any) -> None:
    found = run(host, "--every", "3")
    assert set(values(found)) == {0.0}
    assert found.metric is not None
    assert found.metric.steps == (3, 6, 9)


def test_either_side_of_a_policy_moves_them_apart_and_both_together(host: Any) -> None:
    training = values(run(host, default="bf16"))
    copied = values(run(host, rollout={"default": "bf16"}))
    both = values(run(host, default="bf16", rollout={"default": "bf16"}))
    assert min(*training, *copied) > 1e-8
    assert set(both) == {0.0}


def test_fp16_weights_are_closer_than_those_in_bf16(host: Any) -> None:
    wide = values(run(host, rollout={"weights": "fp16", "activations": "fp16"}))
    narrow = values(run(host, rollout={"weights": "bf16", "activations": "bf16"}))
    assert 10 * max(wide) < min(narrow)


@pytest.mark.parametrize(("arguments", "why"), [
    (("--unnamed", "--frozen"), "copy of the model that generates, and has several (Model, Model): autoprec.register("),
    (("--every", "100"), "other weights than the model at each training forward"),
    (("--returns", "loss"), "no logits of one shape"),
    (("--returns", "unseen"), "no call of the model itself was seen"),
])  # fmt: skip
def test_what_cannot_be_compared_is_said(host: Any, arguments: tuple[str, ...], why: str) -> None:
    found = run(host, *arguments)
    assert found.status == "unreported"
    assert f"did not report {KL} within 14 steps: " in found.reason
    assert why in found.reason
