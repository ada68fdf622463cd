"""Faults in the GEMMs of one layer are named with layer and GEMM; what is right is left alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from autoprec.applying.policy import TorchPolicy
from autoprec.numerics.linear import LinearExecution
from autoprec.policy import policy_from_dict
from autoprec.trial.inside.checking.gemm_check import GemmCheck
from benchmarks.numerics.kernel_faults import RECIPES, checked, faults, perceptron

FAULTS = {fault[0]: fault for fault in faults()}


@pytest.mark.parametrize("what", FAULTS)
def test_a_fault_is_named_with_its_layer_and_gemm(what: str) -> None:
    _, build, recipe, backend, layer, gemm, spoil = FAULTS[what]
    first, *others = checked(build, recipe, backend=backend, spoil=spoil, steps=3).findings
    assert (first["layer"], first["gemm"]) == (layer, gemm)
    assert {row["layer"] for row in others} <= {layer}
    assert first["code"] == ("not_finite" if what == "NaN written" else "beyond_bound")
    assert first["worst"] >= 1
    assert min(first["m"], first["n"], first["k"]) > 0
    assert first["error"]["native"] >= 0
    assert all(low > 0 for low, _ in first["scales"].values())


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("activations", ["keep", "bf16"])
def test_what_is_right_is_not_named(recipe: str, activations: str) -> None:
    report = checked(perceptron(17, 48, 5), recipe, activations=activations, steps=3)
    assert report.ok, report.findings
    assert [(row["layer"], row["gemm"]) for row in report.gemms][:3] == [
        ("first", "fprop"),
        ("second", "fprop"),
        ("third", "fprop"),
    ]
    assert len(report.gemms) == 8, "the first layer's input needs no gradient"
    assert {row["calls"] for row in report.gemms} == {3}
    assert report.not_compared == ()


def trained(model: nn.Module, recipe: str, forward: Callable[[Tensor], Tensor], *, watch: bool) -> tuple[Any, Any]:
    document = {"schema": "autoprec.policy/1", "recipes": {"it": RECIPES[recipe]}, "default": "it"}
    policy_from_dict(document, cls=TorchPolicy).apply(model)
    check = GemmCheck(model) if watch else None
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        model.zero_grad()
        forward(torch.randn(12, 16, generator=generator)).square().mean().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter -= 0.1 * parameter.grad
    report = None if check is None else check.end()
    return report, [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize("recipe", ["int8", "fp8 delayed", "bf16", "nvfp4"])
@pytest.mark.parametrize("reentrant", [None, False, True])
def test_a_checked_step_trains_as_one_that_is_not(recipe: str, reentrant: bool | None) -> None:
    found = []
    for watch in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16))

        def forward(x: Tensor, model: nn.Module = model) -> Tensor:
            if reentrant is None:
                return model(x)  # type: ignore[no-any-return]
            out: Tensor = checkpoint(model, x.requires_grad_(), use_reentrant=reentrant)
            return out

        report, weights = trained(model, recipe, forward, watch=watch)
        assert report is None or report.ok, report.findings
        found.append(weights)
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-2 if recipe == "bf16" else 1e-4, atol=1e-5)


def test_layers_run_as_before_when_the_check_has_ended() -> None:
    before = LinearExecution.__call__
    checked(perceptron(8, 16, 4), "bf16")
    assert LinearExecution.__call__ is before


def test_a_delayed_scale_that_does_not_learn_is_named_before_it_changes_a_result() -> None:
    report = checked(
        *FAULTS["a delayed scale that stays"][1:3], spoil=FAULTS["a delayed scale that stays"][-1], steps=2
    )
    (row,) = [row for row in report.findings if row["code"] == "stale_scale"]
    assert (row["layer"], row["gemm"]) == ("second", "fprop")
    assert row["state"].startswith("weight.")


def test_convolutions_and_recurrent_layers_are_listed_as_not_compared() -> None:
    model = nn.Sequential(nn.Conv1d(4, 8, 3, padding=1), nn.Flatten(), nn.Linear(8 * 16, 8))
    document = {"schema": "autoprec.policy/1", "recipes": {"it": {"format": "bf16"}}, "default": "it"}
    policy_from_dict(document, cls=TorchPolicy).apply(model)
    check = GemmCheck(model)
    model(torch.randn(2, 4, 16)).sum().backward()
    report = check.end()
    assert report.not_compared == ("0",)
    assert {row["layer"] for row in report.gemms} == {"2"}
