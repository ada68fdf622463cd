"""One policy on every model of a kind that a script trains, and nothing trained without it unnoticed."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from autoprec.applying.swap import execution_of
from autoprec.optim.tensor import StoredTensor
from autoprec.trial.inside.observe.discovery import discover
from autoprec.trial.inside.observe.hooks import Hooks
from autoprec.trial.inside.policy_run import APPLIED, LEFT, REFUSED, PolicyRun
from tests.trial.conftest import uniform


class Net(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, width), nn.Linear(width, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x).relu())  # type: ignore[no-any-return]


class Other(Net):
    pass


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, *, hidden: bool = False) -> None:
    x = torch.ones(16, 8)
    (model.forward(x) if hidden else model(x)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def under_policy(model: nn.Module) -> bool:
    layers = [m for m in model.modules() if isinstance(m, nn.Linear)]
    assert len({execution_of(m) is None for m in layers}) == 1
    return execution_of(layers[0]) is not None


@pytest.fixture
def hooks() -> Iterator[Hooks]:
    made = Hooks()
    made.install()
    yield made
    made.remove()


@pytest.fixture
def run(hooks: Hooks, tmp_path: Path) -> PolicyRun:
    config = {"policy": uniform("bf16"), "audit": str(tmp_path / "audit.json")}
    return PolicyRun(config, hooks, tmp_path)


def begin(run: PolicyRun, model: nn.Module) -> torch.optim.Optimizer:
    optimizer = optimizer_of(model)
    found = discover([optimizer])
    assert found is not None
    run.begin(found)
    step(model, optimizer)
    return optimizer


def test_every_fold_is_under_the_policy_and_in_the_audit(run: PolicyRun, hooks: Hooks, tmp_path: Path) -> None:
    model: nn.Module = Net()
    begin(run, model)
    for fold in range(4):
        model = Net(16 + 8 * fold)
        optimizer = optimizer_of(model)
        assert not under_policy(model)
        step(model, optimizer, hidden=fold == 3)  # seen after its first step: its second runs under the policy
        step(model, optimizer)
        assert under_policy(model), fold
        assert "autoprec" not in nn.Module.__call__.__module__
    run._write_audit()
    audit = json.loads((tmp_path / "audit.json").read_text())
    assert [row["model"] for row in audit["models"]] == ["Net"] * 5
    assert audit["ok"]
    assert (tmp_path / APPLIED).exists()


def test_the_audit_shows_the_model_that_ran_something_else(run: PolicyRun, tmp_path: Path) -> None:
    models = [Net(), Net()]
    optimizers = [begin(run, models[0]), optimizer_of(models[1])]
    step(models[1], optimizers[1])
    models[1].get_submodule("a").__dict__.pop("_autoprec")
    run._write_audit()
    audit = json.loads((tmp_path / "audit.json").read_text())
    assert [row["ok"] for row in audit["models"]] == [True, False]
    assert not audit["ok"]


def test_another_kind_of_model_is_named_and_left_as_it_is(run: PolicyRun, capfd: pytest.CaptureFixture[str]) -> None:
    begin(run, Net())
    other = Other()
    step(other, optimizer_of(other))
    assert not under_policy(other)
    assert "Other is trained without the policy" in capfd.readouterr().err


@pytest.fixture
def named(hooks: Hooks, tmp_path: Path) -> PolicyRun:
    """A policy found for :class:`Net`, with a rule that only its layers match."""
    document = uniform("bf16") | {
        "layers": [{"match": "b", "recipe": "bf16"}],
        "model": {"class": "Net", "parameters": sum(p.numel() for p in Net().parameters())},
    }
    return PolicyRun({"policy": document, "audit": str(tmp_path / "audit.json")}, hooks, tmp_path)


@pytest.mark.parametrize(
    "changes", [{"model": {"class": "Net", "parameters": 1}}, {"layers": [{"match": "core", "recipe": "bf16"}]}]
)
def test_what_a_script_starts_trains_another_model_without_the_policy(
    changes: dict[str, Any], hooks: Hooks, tmp_path: Path
) -> None:
    """The policy names another model, or fits another; the script itself would be ended."""
    (tmp_path / "first").write_text(str(os.getpid() + 1))
    config = {"policy": uniform("bf16") | changes, "audit": str(tmp_path / "audit.json"), "single": True}
    model = Net()
    begin(PolicyRun(config, hooks, tmp_path), model)
    assert not under_policy(model)
    assert (tmp_path / LEFT).exists()
    assert not (tmp_path / APPLIED).exists()
    assert not (tmp_path / REFUSED).exists()


def test_a_throw_away_fit_before_the_real_model_is_let_pass(
    named: PolicyRun, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    line, model = nn.Linear(8, 1), Net()
    begin(named, line)
    told = capfd.readouterr().err
    assert "Linear is trained without the policy" in told
    assert "waiting up to 10 steps for the model that the policy is for (Net, 280 parameters)" in told
    assert not (tmp_path / APPLIED).exists()
    optimizer = optimizer_of(model)
    step(model, optimizer)
    assert execution_of(model.b) is not None
    assert (tmp_path / APPLIED).exists()


def test_a_throw_away_fit_is_let_pass_by_a_policy_that_names_no_model(
    hooks: Hooks, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    rules = uniform("bf16") | {"layers": [{"match": "b", "recipe": "bf16"}]}
    run = PolicyRun({"policy": rules}, hooks, tmp_path)
    begin(run, nn.Linear(8, 1))
    told = capfd.readouterr().err
    assert "match no tunable layer: 'b'; waiting up to 10 steps for a model with a layer that the policy's" in told
    assert (tmp_path / LEFT).exists()  # should the script end here
    model = Net()
    step(model, optimizer_of(model))
    assert execution_of(model.b) is not None
    wrong = PolicyRun({"policy": rules | {"layers": [{"match": "bb", "recipe": "bf16"}]}}, hooks, tmp_path)
    large = nn.Linear(400, 400)
    found = discover([optimizer_of(large)])
    assert found is not None
    with pytest.raises(SystemExit):  # its steps are not free: refused at once
        wrong.begin(found)


def test_a_model_of_the_policys_size_that_it_is_not_for_is_not_trained_at_all(
    named: PolicyRun, capfd: pytest.CaptureFixture[str]
) -> None:
    model = Other(width=4)
    optimizer = optimizer_of(model)
    found = discover([optimizer])
    assert found is not None
    named._document["layers"][0]["match"] = "no.such.layer"
    with pytest.raises(SystemExit):
        named.begin(found)
    told = capfd.readouterr().err
    assert "no.such.layer" in told
    assert "the script is ended here" in told
    assert "waiting" not in told
    assert "trained without the policy, which" not in told


def test_a_small_model_that_the_policy_is_not_for_is_not_trained_for_long(
    named: PolicyRun, capfd: pytest.CaptureFixture[str]
) -> None:
    line = nn.Linear(8, 1)
    optimizer = begin(named, line)
    for _ in range(8):
        step(line, optimizer)
    with pytest.raises(SystemExit):
        step(line, optimizer)
    assert "the script is ended after 10 steps" in capfd.readouterr().err


def test_the_model_that_the_policy_names_comes_under_it_after_another_that_it_fits(
    hooks: Hooks, tmp_path: Path
) -> None:
    document = uniform("bf16") | {"model": {"class": "Net", "parameters": sum(p.numel() for p in Net().parameters())}}
    run = PolicyRun({"policy": document}, hooks, tmp_path)
    begin(run, nn.Linear(8, 8))
    model = Net()
    step(model, optimizer_of(model))
    assert under_policy(model)


def test_a_second_optimizer_of_one_model_stores_its_state_as_the_policy_says(hooks: Hooks, tmp_path: Path) -> None:
    run = PolicyRun({"policy": {**uniform("bf16"), "optimizer": {"exp_avg": "bf16"}}}, hooks, tmp_path)
    model = Net()
    begin(run, model)
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer)
    step(model, optimizer)
    assert isinstance(optimizer.state[model.a.weight]["exp_avg"], StoredTensor)


def test_an_optimizer_that_trains_nothing_is_forgotten(run: PolicyRun) -> None:
    model = Net()
    optimizer = begin(run, model)
    idle = optimizer_of(nn.Linear(2, 2))
    for _ in range(2001):
        model(torch.ones(1, 8))
    step(model, optimizer)
    assert run._fresh == []
    assert idle.param_groups


def test_a_script_that_swallows_everything_does_not_train_without_its_policy(
    hooks: Hooks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    class Ended(BaseException):
        pass

    def ended(code: int) -> Any:
        raise Ended(code)

    monkeypatch.setattr(os, "_exit", ended)
    monkeypatch.setattr("autoprec.trial.inside.policy_run.SMALL_MODEL", 0)
    model = Net()
    run = PolicyRun({"policy": uniform("bf16", "no.such.layer")}, hooks, tmp_path)
    with pytest.raises(SystemExit):
        begin(run, model)
    assert "no.such.layer" in capfd.readouterr().err
    assert (tmp_path / REFUSED).exists()
    with pytest.raises(Ended):
        model(torch.ones(1, 8))
    with pytest.raises(Ended), torch.autograd.set_grad_enabled(True):
        torch.ones(1, requires_grad=True).sum().backward()
