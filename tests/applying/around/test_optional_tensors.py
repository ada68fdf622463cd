"""Operators that are handed an optional tensor run in float32 where it is None, on every device."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from autoprec import Policy
from autoprec.applying.around.operators import RootExecution
from autoprec.policy import OperatorPolicy
from tests.applying.around.test_operators import Probe

#: Functions that hand the mode, or are handed, an optional tensor that is None.
ABSENT = {
    "normalize": ("norm", lambda h: F.normalize(h, dim=-1)),
    "norm": ("norm", lambda h: torch.norm(h, dim=-1)),
    "norm of order 1": ("norm", lambda h: torch.norm(h, 1, -1, out=None)),
    "vector_norm": ("norm", lambda h: torch.linalg.vector_norm(h, out=None)),
    "exp": ("softmax", lambda h: torch.exp(h, out=None)),
    "softmax": ("softmax", lambda h: torch.softmax(h, -1, out=None)),
    "logsumexp": ("softmax", lambda h: torch.logsumexp(h, -1, out=None)),
    "cumsum": ("norm", lambda h: torch.cumsum(h, -1, out=None)),
    "mean": ("norm", lambda h: torch.mean(h, -1, out=None)),
    "prod": ("norm", lambda h: torch.prod(h, -1, out=None)),
    "layer_norm": ("norm", lambda h: F.layer_norm(h, (8,), weight=None, bias=None)),
    "batch_norm": ("norm", lambda h: F.batch_norm(h, None, None, weight=None, bias=None, training=True)),
    "cross_entropy": ("loss", lambda h: F.cross_entropy(h, torch.zeros(4, dtype=torch.long), weight=None)),
}


@pytest.mark.parametrize("activations", ["bf16", "keep"])
@pytest.mark.parametrize("case", ABSENT)
def test_an_optional_tensor_that_is_none_does_not_keep_an_operator_from_float32(case: str, activations: str) -> None:
    kind, function = ABSENT[case]
    found: list[torch.Tensor] = []

    def noted(h: torch.Tensor) -> torch.Tensor:
        found[:] = h.detach(), function(h)
        return found[1]

    model, x = Probe(noted), torch.randn(4, 8)
    recipes = {"bf16": {"format": "bf16"}}
    policy = Policy.model_validate({"recipes": recipes, "default": "bf16", "activations": activations})
    if activations == "keep":
        model, x = model.bfloat16(), x.bfloat16()
    policy.apply(model)
    model(x)
    exact = function(found[0].double())
    tolerance = 1e-6 if activations == "bf16" else 2**-8  # a model in bf16 gets its own dtype back, rounded once
    assert torch.allclose(found[1].double(), exact, rtol=tolerance, atol=tolerance)
    row = policy.audit(model).operators[kind]
    if activations == "keep" and case in ("exp", "cumsum", "mean", "prod"):
        assert "by hand" in row["reason"]
    else:
        assert (row["executed"], row["reason"]) == ("fp32", "")


@torch.no_grad()
@pytest.mark.parametrize("later", [torch.exp, torch.softmax])
def test_what_writes_into_a_tensor_of_16_bits_is_not_called_float32(later) -> None:
    def both(h: torch.Tensor) -> torch.Tensor:
        torch.exp(h, out=torch.empty_like(h))
        return later(h) if later is torch.exp else later(h, -1)

    model = Probe(both)
    policy = Policy(activations="bf16")
    policy.apply(model)
    model(torch.randn(4, 8))
    row = policy.audit(model).operators["softmax"]
    assert (row["executed"], row["ok"]) == ("bf16", False)


@pytest.mark.parametrize("function", [lambda h: F.normalize(h, dim=-1), lambda h: F.smooth_l1_loss(h, -h)])
def test_under_autocast_a_gpu_runs_operators_as_a_cpu_does(function) -> None:
    """Trials on a CPU and the run on a GPU differed where torch's two lists do, and the audit said fp32 of all."""
    found = {}
    for device in ("cpu", "cuda"):
        root = RootExecution(torch.bfloat16, OperatorPolicy(), device)
        out = root._guarded(function, (torch.ones(4, 8, dtype=torch.bfloat16),), {}, True)
        found[device] = out.dtype, root.executed
    assert found["cuda"] == found["cpu"]
    assert len(found["cuda"][1]) == 1
