"""One stage of a policy on a live model: tried, put there, exchanged, and whole or not at all."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autoprec import Policy
from autoprec.applying import stage
from autoprec.applying.phases import phases_of
from autoprec.applying.raw_weights import unit_execution
from autoprec.applying.stage import put_stage, take_off
from autoprec.applying.swap import root_of
from autoprec.applying.units import tunable_units
from autoprec.errors import AutoPrecWarning, PolicyMismatchError, UnsupportedError
from autoprec.precision.recipes import BUILTIN_RECIPES

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


ON_PART: dict[str, Any] = {
    "bf16": {"recipes": {"r": {"format": "bf16"}}, "default": "r", "activations": "bf16"},
    "fp8": {"recipes": {"r": BUILTIN_RECIPES["fp8_delayed"].to_dict()}, "default": "r"},
    "activations": {"activations": "bf16"},
    "phases": {
        "recipes": {"r": {"format": "bf16"}},
        "default": "r",
        "activations": "bf16",
        "phases": [{"from": 2, "default": "keep"}],
    },
    "attention": {"operators": {"attention": "bf16"}, "activations": "bf16"},
}


@pytest.mark.parametrize("kind", ON_PART)
@pytest.mark.parametrize("order", ["part, whole", "whole, part", "part, whole, part", "layer, part, whole"])
@pytest.mark.parametrize("off", ["whole", "part, whole", "layer, part, whole"])
def test_a_policy_of_a_whole_model_takes_those_of_its_parts_off(kind: str, order: str, off: str) -> None:
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.LayerNorm(16)), nn.Linear(16, 4))
    parts = {"whole": whole, "part": whole[0], "layer": whole[0][0]}
    x = torch.randn(8, 16)
    plain, classes = whole(x), [type(module) for module in whole.modules()]
    for name in order.split(", "):
        policy = ON_PART["fp8"] if name == "whole" else ON_PART[kind]
        Policy.model_validate(policy).apply(parts[name])
        whole(x).sum().backward()
    if order.endswith("whole"):  # as it is under this policy alone
        alone = copy.deepcopy(whole)
        Policy().remove(alone)
        Policy.model_validate(ON_PART["fp8"]).apply(alone)
        Policy.model_validate(ON_PART["fp8"]).apply(whole)
        assert torch.equal(alone(x), whole(x))
    for name in off.split(", "):
        Policy().remove(parts[name])
    assert torch.equal(plain, whole(x))
    assert [type(module) for module in whole.modules()] == classes
    assert not any(name.startswith("_autoprec") for module in whole.modules() for name in module.__dict__)
    assert not any(phases_of(module) for module in whole.modules())


def test_the_audit_of_a_model_tells_of_a_policy_on_a_part() -> None:
    whole = nn.Sequential(nn.Sequential(nn.Linear(16, 16), nn.GELU()), nn.Linear(16, 4))
    outer = Policy.model_validate(ON_PART["fp8"])
    outer.apply(whole)
    Policy.model_validate(ON_PART["activations"]).apply(whole[0])
    whole(torch.randn(8, 16)).sum().backward()
    report = outer.audit(whole)
    assert not report.ok
    row = report.operators["activations"]
    assert (row["ok"], row["executed"]) == (False, "bf16")
    assert "part '0'" in row["reason"]


class Kept(nn.Module):
    """Keeps what its norm and its softmax returned, and what they were given."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(32, 64), nn.LayerNorm(64), nn.Linear(64, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.given = self.first(x)
        self.seen = torch.cat([F.cosine_similarity(self.given, self.given.roll(1, 0)), self.given.logsumexp(-1)])
        result: torch.Tensor = self.last(self.norm(self.given))
        return result


def _by_data(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()


def _assigned(model: nn.Module) -> None:
    model.load_state_dict({key: value.bfloat16() for key, value in model.state_dict().items()}, assign=True)


CASTS: dict[str, Callable[[nn.Module], Any]] = {
    "to": lambda model: model.to(torch.bfloat16),
    "half": lambda model: model.half(),
    "wrapper": lambda model: nn.Sequential(model).bfloat16(),
    "parts": lambda model: [part.bfloat16() for part in model.children()],
    "data": _by_data,
    "assigned": _assigned,
}


@pytest.mark.parametrize("copied", [False, True])
@pytest.mark.parametrize("how", CASTS)
def test_operators_stay_in_float32_in_a_model_that_is_cast_after_the_policy_was_applied(how: str, copied: bool) -> None:
    policy = Policy.model_validate(
        {"recipes": {"r": {"format": "fp8", "scaling": {"granularity": "row", "scale": "current"}}}, "default": "r"}
    )
    torch.manual_seed(0)
    first, x = Kept(), torch.randn(16, 32)
    after = copy.deepcopy(first)
    CASTS[how](first)
    policy.apply(first)
    policy.apply(after)
    if copied:
        after = copy.deepcopy(after)
    CASTS[how](after)
    for model in (first, after):
        model(x.to(model.first.weight.dtype)).float().sum().backward()
        rows = policy.audit(model).operators
        assert (rows["norm"]["executed"], rows["softmax"]["executed"]) == ("fp32", "fp32")
    assert torch.equal(first.seen, after.seen)
    after.float()
    root = root_of(after)
    root.executed.clear()
    after(x).sum().backward()
    assert not root.needed("cpu")
    assert policy.audit(after).operators["norm"]["reason"] == "nothing of low precision reached it"


def test_inputs_of_low_precision_reach_operators_as_well() -> None:
    policy = Policy.model_validate({"recipes": {"f": {"format": "fp32"}}, "layers": [{"match": "0", "recipe": "f"}]})
    model = nn.Sequential(nn.Linear(8, 8))
    model.forward = lambda given: F.softmax(given["x"], -1)  # type: ignore[assignment, method-assign]
    policy.apply(model)
    low = torch.randn(4, 8).bfloat16()
    assert model({"x": low}).dtype is torch.bfloat16
    assert policy.audit(model).operators["softmax"]["executed"] == "fp32"


def test_layers_without_a_shape_are_refused_by_name() -> None:
    model = nn.Sequential(nn.LazyLinear(16), nn.Sequential(nn.Linear(16, 8)))
    policy = Policy.model_validate({"default": "bf16", "recipes": {"bf16": {"format": "bf16"}}})
    with pytest.raises(UnsupportedError, match=r"layer '0'.*first forward"):
        policy.apply(model)
    Policy.model_validate({"activations": "bf16"}).apply(model)  # which is about no layer
    model(torch.ones(2, 4))
    policy.apply(model)
    model(torch.ones(2, 4)).sum().backward()
    assert policy.audit(model).ok
