"""One stage of a policy on a live model: tried, put there, exchanged, and whole or not at all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from autoprec import Policy
from autoprec.applying import stage
from autoprec.applying.raw_weights import unit_execution
from autoprec.applying.stage import put_stage, take_off
from autoprec.applying.units import tunable_units
from autoprec.errors import AutoPrecWarning, PolicyMismatchError, UnsupportedError

DELAYED = {"format": "fp8", "scaling": {"granularity": "tensor", "scale": "delayed", "amax_history_len": 8}}


def policy(match: str = "*", **changes: Any) -> Policy:
    recipes = {"fp8": DELAYED, "bf16": {"format": "bf16"}}
    return Policy.model_validate({"recipes": recipes, "layers": [{"match": match, "recipe": "fp8"}], **changes})


@pytest.fixture
def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 16))


def executions(model: nn.Module) -> list[Any]:
    return [unit_execution(unit) for unit in tunable_units(model).values()]


def test_a_trial_of_a_stage_changes_nothing_and_raises_what_applying_would(model: nn.Sequential) -> None:
    put_stage(policy(), model, only_try=True)
    with pytest.raises(PolicyMismatchError):
        put_stage(policy("encoder"), model, only_try=True)
    assert [type(m) for m in model.modules()] == [nn.Sequential, nn.Linear, nn.Linear]


def test_layers_whose_plan_stays_keep_their_executions_only_where_asked(model: nn.Sequential) -> None:
    put_stage(policy(), model)
    first = executions(model)
    half = policy(layers=[{"match": "0", "recipe": "fp8"}, {"match": "1", "recipe": "bf16"}])
    put_stage(half, model, keep=True)
    assert executions(model)[0] is first[0]
    assert executions(model)[1] is not first[1]
    put_stage(policy(), model)
    assert executions(model)[0] is not first[0]
    take_off(model)
    assert type(model[0]) is nn.Linear


@pytest.mark.parametrize("place", ["install", "_install_root", "set_execution"])
@pytest.mark.parametrize("earlier", [False, True])
def test_an_interrupted_stage_leaves_the_model_as_it_was(
    model: nn.Sequential, place: str, earlier: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = policy("0", activations="bf16")
    if earlier:
        put_stage(first, model)
    x = torch.randn(4, 16)
    before, classes = model(x), [type(m) for m in model.modules()]
    original, calls = getattr(stage, place), []

    def interrupted(*args: object) -> None:
        calls.append(args)
        original(*args)
        if len(calls) == (2 if place == "install" else 1):
            raise KeyboardInterrupt

    monkeypatch.setattr(stage, place, interrupted)
    with pytest.raises(KeyboardInterrupt):
        put_stage(policy(activations="bf16"), model)
    assert [type(m) for m in model.modules()] == classes
    assert torch.equal(model(x), before)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("kind", ["trace", "script", "onnx", "onnx, dynamo"])
def test_what_cannot_be_exported_names_the_line_that_helps(
    model: nn.Sequential, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.randn(4, 16)

    def export() -> None:
        if kind == "trace":
            torch.jit.trace(model, x)
        elif kind == "script":
            torch.jit.script(model)
        elif kind == "onnx":  # which traces, in a state of its own; the package onnx is asked for at the end only
            torch.onnx.export(model, (x,), "model.onnx", dynamo=False)
        else:
            monkeypatch.setattr(torch.onnx, "is_in_onnx_export", lambda: True)
            torch.export.export(model, (x,))

    put_stage(policy(), model)
    with pytest.raises(UnsupportedError) as caught:
        export()
    assert "policy.remove(model)" in str(caught.value.fix)
    take_off(model)
    if kind in ("trace", "script"):
        export()


@pytest.mark.parametrize("matches", [["encoder.*"], ["encoder.*", "*.linear_fc1"]])
def test_optional_rules_of_which_none_fits_are_told(model: nn.Sequential, matches: list[str]) -> None:
    rules = [{"match": match, "recipe": "fp8", "optional": True} for match in matches]
    with pytest.warns(AutoPrecWarning, match=r"no rule of the policy fits .* its layers are 0, 1"):
        put_stage(policy(layers=rules), model)
    put_stage(policy(layers=[*rules, {"match": "1", "recipe": "fp8", "optional": True}]), model)  # one is enough
    put_stage(policy(layers=[{"match": "encoder.*", "recipe": "keep", "optional": True}]), model)  # nothing is asked
