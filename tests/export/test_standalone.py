"""The plain-PyTorch module computes what the policy computes, can be taken off, and can be copied."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from autoprec.applying.policy import apply_policy
from autoprec.export import export
from tests.export.readers import load_source
from tests.export.toys import distance, gradients, one_rule, toy_model


@pytest.mark.parametrize("rule", [{}, {"gemms": {"wgrad": "bf16"}}], ids=["uniform", "wgrad in bf16"])
@pytest.mark.parametrize(
    "name", ["bf16", "fp8_tensorwise", "fp8_rowwise", "fp8_delayed", "fp8_block", "bf16_fp32_output"]
)
def test_the_plain_module_agrees_with_apply(name: str, rule: dict[str, Any]) -> None:
    policy = one_rule(name, **rule)
    source = export(policy, "python").files["precision_policy.py"]
    module = load_source(source, "precision_policy")
    ours, theirs, plain = toy_model(), toy_model(), toy_model()
    apply_policy(policy, ours, backend="emulated")
    module.apply(theirs)
    reference = gradients(plain)
    gap, effect = distance(gradients(theirs), gradients(ours)), distance(gradients(ours), reference)
    # the two differ by where products are rounded to bf16; both lie far nearer to each other than to float32
    assert gap <= max(0.35 * effect, 1e-6)


def test_the_plain_module_can_be_taken_off_again() -> None:
    policy = one_rule("fp8_rowwise").model_copy(update={"activations": "bf16"})
    module = load_source(export(policy, "python").files["precision_policy.py"], "precision_policy")
    model, plain = toy_model(), toy_model()
    keys = list(model.state_dict())
    module.apply(model)
    assert list(model.state_dict()) == keys
    assert isinstance(model[0], nn.Linear)
    assert model(torch.ones(2, 160)).dtype is torch.float32  # operators.output
    assert "forward" in model.__dict__
    module.remove(model)
    assert type(model[0]) is nn.Linear
    assert all(torch.equal(a, b) for a, b in zip(gradients(model), gradients(plain), strict=True))


def test_a_copy_of_a_model_under_the_plain_module_trains_by_itself() -> None:
    module = load_source(export(one_rule("fp8_delayed"), "python").files["precision_policy.py"], "precision_policy")
    model = module.apply(toy_model())
    other = copy.deepcopy(model)
    assert all(torch.equal(a, b) for a, b in zip(gradients(model), gradients(other), strict=True))


def test_the_plain_module_returns_fp32_sums_where_the_policy_does() -> None:
    policy = one_rule("bf16_fp32_output").model_copy(update={"activations": "bf16"})
    done = export(policy, "python")
    assert [kept for kept in done.kept if kept.endswith("bf16 -> fp32")] != []
    module = load_source(done.files["precision_policy.py"], "precision_policy")
    ours, theirs, x = toy_model(), toy_model(), torch.randn(3, 160)
    apply_policy(policy, ours)
    module.apply(theirs)
    assert torch.equal(ours(x), theirs(x))
    assert "bf16 -> fp32" in {loss.what for loss in export(policy, "megatron", allow_lossy=True).losses}
