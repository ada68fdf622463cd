"""What a benign perturbation changes, and that it changes nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from autoprec.trial.inside import perturbing
from autoprec.trial.inside.observe.discovery import Found
from autoprec.trial.inside.perturbing import perturb_run, round_weights
from autoprec.trial.protocol import STILL


def test_perturbation_is_one_bf16_rounding() -> None:
    model = nn.Linear(8, 8)
    before = model.weight.detach().clone()
    round_weights(Found([model], [], list(model.parameters())))
    assert torch.equal(model.weight, before.bfloat16().float())
    gap = (model.weight.detach() - before).abs() / before.abs()
    assert 0 < float(gap.max()) <= 2**-8


def test_a_seeded_perturbation_rounds_up_or_down_at_random_and_leaves_the_streams_alone() -> None:
    model = torch.nn.Linear(64, 64)
    before = model.weight.detach().clone()
    nearest, state = before.to(torch.bfloat16).float(), torch.get_rng_state()
    rounded = {}
    for perturb in ("bf16", "bf16:1", "bf16:2", "bf16:1"):
        with torch.no_grad():
            model.weight.copy_(before)
        round_weights(Found([model], [], list(model.parameters())), perturb)
        after = model.weight.detach().clone()
        assert torch.equal(after, after.to(torch.bfloat16).float())
        assert ((after - before).abs() <= before.abs() * 2**-7).all()  # a neighbour in bfloat16, on either side
        assert torch.equal(rounded.setdefault(perturb, after), after)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(rounded["bf16"], nearest)
    assert not torch.equal(rounded["bf16:1"], rounded["bf16:2"])
    assert abs(float((rounded["bf16:1"] - before).mean())) < 2e-5  # without bias: 64 x 64 errors of some 1e-4


@pytest.mark.parametrize("perturb", ["bf16", "bf16:1"])
@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_complex_weights_are_rounded_in_both_parts(dtype: torch.dtype, perturb: str) -> None:
    weight = nn.Parameter(torch.randn(8, 8, dtype=dtype))
    before = weight.detach().clone()
    round_weights(Found([nn.Module()], [], [weight]), perturb)
    gaps = (torch.view_as_real(weight.detach()) - torch.view_as_real(before)).abs() / torch.view_as_real(before).abs()
    assert 0 < float(gaps[..., 0].max()) < 2**-6
    assert 0 < float(gaps[..., 1].max()) < 2**-6


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("SGD", {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
        ("Adam", {"amsgrad": True}),
        ("AdamW", {"weight_decay": 0.5, "fused": True}),
        ("RMSprop", {"momentum": 0.9, "centered": True}),
        ("Adagrad", {}),
        ("Adafactor", {}),
        ("NAdam", {"decoupled_weight_decay": True, "weight_decay": 0.1}),
        ("LBFGS", {}),
    ],
)
def test_a_still_run_changes_no_weight_whatever_the_schedule(
    kind: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = nn.Linear(8, 8), torch.randn(4, 8)
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.1, **options)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
    before = [parameter.detach().clone() for parameter in model.parameters()]

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        value = model(x).square().mean()
        value.backward()
        return value

    def trains() -> bool:
        for _ in range(3):
            optimizer.step(loss)
            schedule.step()
        return any(not torch.equal(one, p) for one, p in zip(before, model.parameters(), strict=True))

    with monkeypatch.context() as patch:
        patch.setattr(perturbing, "register_optimizer_step_pre_hook", optimizer.register_step_pre_hook)
        perturb_run(Found([model], [optimizer], list(model.parameters())), STILL)
    assert not trains()
    optimizer._optimizer_step_pre_hooks.clear()
    assert trains()
