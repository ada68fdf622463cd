"""The rollout section of a policy: what it does to the copy that generates, and to nothing else."""

import copy
import gc

import pytest
import torch
from torch import nn

from autoprec import Policy, register
from autoprec.applying.generating.pairs import rollout_of
from autoprec.applying.policy import apply_policy
from autoprec.applying.prepared import Prepared
from autoprec.errors import PolicyMismatchError, UnsupportedError, UsageError
from autoprec.precision.recipes import BUILTIN_RECIPES

X = torch.randn(4, 32, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)
        self.register_buffer("shift", torch.zeros(32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x.to(self.shift.dtype) + self.shift)))


def both() -> tuple[Net, Net]:
    torch.manual_seed(0)
    model = Net()
    rollout = copy.deepcopy(model).eval().requires_grad_(False)
    assert register(policy=model, rollout=rollout) is model
    return model, rollout


def policy(**rollout: object) -> Policy:
    recipes = {name: BUILTIN_RECIPES[name] for name in ("bf16", "fp16", "fp8_rowwise", "fp8_delayed")}
    return Policy.model_validate({"recipes": recipes, "rollout": rollout})


def step(model: Net, rollout: Net) -> torch.Tensor:
    model(X).square().sum().backward()
    with torch.no_grad():
        return rollout(X)


def test_a_section_changes_the_copy_that_generates_alone_and_is_taken_off_again() -> None:
    model, rollout = both()
    plain, other = model(X), rollout(X)
    section = policy(layers=[{"match": "up", "recipe": "fp8_rowwise"}], default="bf16")
    section.apply(model)
    ran = step(model, rollout)
    assert torch.equal(model(X), plain)
    assert not torch.equal(ran, other)
    audit = section.audit(model)
    assert audit.ok
    rows = {row.name: row for row in audit.layers}
    assert rows["up"].executed == dict.fromkeys(("fprop", "dgrad", "wgrad"), "keep")
    assert rows["rollout: up"].requested == rows["rollout: up"].executed == {"fprop": "fp8 row e4m3/e4m3/e4m3"}
    assert rows["rollout: down"].executed == {"fprop": "bf16"}
    assert not audit.did_not_run
    Policy().apply(model)  # a policy that was applied before is replaced, on both sides
    assert torch.equal(rollout(X), other)
    section.apply(model)
    section.remove(model)
    assert torch.equal(rollout(X), other)


def test_activations_and_weights_of_the_copy_are_as_asked() -> None:
    model, rollout = both()
    half = policy(activations="fp16", weights="fp16")
    half.apply(model)
    assert {one.dtype for one in rollout.parameters()} == {torch.float16}
    assert {one.dtype for one in model.parameters()} == {torch.float32}
    step(model, rollout)
    operators = half.audit(model).operators
    assert operators["rollout: weights"]["executed"] == operators["rollout: activations"]["executed"] == "fp16"
    assert half.audit(model).ok
    half.remove(model)
    assert {one.dtype for one in rollout.parameters()} == {torch.float32}


def test_an_audit_tells_of_a_copy_that_did_not_run_as_asked() -> None:
    model, rollout = both()
    asked = policy(default="bf16", weights="bf16")
    asked.apply(model)
    model(X).sum().backward()
    found = asked.audit(model)
    assert not found.ok
    assert [row.name for row in found.mismatches] == ["rollout: up", "rollout: down"]
    rollout.load_state_dict(model.state_dict(), assign=True)
    row = asked.audit(model).operators["rollout: weights"]
    assert (row["ok"], row["executed"]) == (False, "fp32")
    assert "assign=True" in row["reason"]
    del rollout
    gc.collect()
    assert rollout_of(model) is None
    assert "not there any more" in asked.audit(model).operators["rollout"]["reason"]


def test_what_cannot_be_carried_out_is_refused_before_anything_is_changed() -> None:
    model, rollout = both()
    plain = type(model.up)
    wrong = policy(layers=[{"match": "side", "recipe": "bf16"}]).model_copy(update={"default": "bf16"})
    with pytest.raises(PolicyMismatchError, match="side"):
        wrong.apply(model)
    assert type(model.up) is type(rollout.up) is plain
    with pytest.raises(UsageError, match=r"autoprec.register\(policy=model, rollout=rollout\)"):
        policy(default="bf16").apply(Net())
    shared = Net()
    shared.load_state_dict(model.state_dict())
    for name in ("up", "down"):
        getattr(shared, name).weight = getattr(model, name).weight
    register(policy=model, rollout=shared)
    with pytest.raises(UnsupportedError, match="cast the weights that are trained"):
        policy(weights="fp16").apply(model)
    assert shared.up.weight.dtype is torch.float32


def test_what_is_on_the_copy_is_held_and_put_back_with_the_model() -> None:
    model, rollout = both()
    before = Prepared(model)
    plain = rollout(X)
    apply_policy(policy(default="bf16", weights="bf16"), model)
    under, ran = Prepared(model), rollout(X)
    before.put()
    rollout.load_state_dict(model.state_dict())
    assert torch.equal(rollout(X), plain)
    under.put()
    rollout.load_state_dict(model.state_dict())
    assert torch.equal(rollout(X), ran)
