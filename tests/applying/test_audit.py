"""Asked against executed: what a mismatch looks like, and what is none."""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

from autoprec import Policy
from autoprec.applying.audit import audit_model, emulated_note
from autoprec.applying.policy import apply_policy
from autoprec.applying.swap import execution_of
from autoprec.backends.emulated import EmulatedBackend
from autoprec.errors import UnsupportedError
from autoprec.precision.recipes import BUILTIN_RECIPES
from tests.warm import Forked


@pytest.fixture
def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32), nn.Conv1d(1, 2, 3))


def policy(name: str, match: str = "[01]") -> Policy:
    return Policy.model_validate({"recipes": {"r": BUILTIN_RECIPES[name]}, "layers": [{"match": match, "recipe": "r"}]})


def run(model: nn.Sequential) -> None:
    model[1](model[0](torch.randn(4, 32))).sum().backward()


def test_applied_but_never_run(model: nn.Sequential) -> None:
    p = policy("bf16")
    assert [r.reason for r in p.audit(model).mismatches] == ["the policy is not applied to this layer"] * 2
    p.apply(model)
    assert [r.reason for r in p.audit(model).mismatches] == ["never called"] * 2
    with torch.no_grad():
        model[0](torch.randn(4, 32))
    assert "dgrad and wgrad did not run in these steps" in p.audit(model).layers[0].reason
    run(model)
    assert p.audit(model).ok


def test_activations_around_a_model_that_is_never_called_name_the_reason(model: nn.Sequential) -> None:
    p = Policy.model_validate({"activations": "bf16"})
    p.apply(model)
    run(model)
    row = p.audit(model).operators["activations"]
    assert (row["ok"], row["executed"]) == (False, "-")
    assert row["reason"].startswith("the model was not called, only its parts were")


@pytest.mark.parametrize("name", ["bf16", "fp8_rowwise"])
def test_what_did_not_need_to_run_is_no_mismatch(model: nn.Sequential, name: str) -> None:
    model[1].weight.requires_grad_(False)
    p = policy(name)
    p.apply(model)
    run(model)
    rows = p.audit(model).layers
    assert rows[0].ok
    assert "no dgrad" in rows[0].reason
    assert rows[1].ok
    assert "no wgrad" in rows[1].reason


def test_another_policy_is_a_mismatch(model: nn.Sequential) -> None:
    policy("fp8_rowwise").apply(model)
    run(model)
    report = policy("mxfp8").audit(model)
    assert not report.ok
    assert "fprop ran as fp8 row" in report.layers[0].reason
    nothing = Policy().audit(model)
    assert "a policy is installed where none was asked for" in nothing.layers[0].reason


def test_executed_comes_from_what_ran(model: nn.Sequential) -> None:
    p = policy("fp8_rowwise")
    p.apply(model)
    run(model)
    execution_of(model[0]).ran["wgrad"] = "bf16"
    report = p.audit(model)
    assert [row.name for row in report.mismatches] == ["0"]
    assert "wgrad ran as bf16" in report.layers[0].reason


def test_refused_layers_are_reported_when_not_strict(model: nn.Sequential) -> None:
    p = policy("fp8_rowwise", match="*")
    apply_policy(p, model, strict=False)
    run(model)
    report = p.audit(model)
    assert [row.name for row in report.mismatches] == ["2"]


def test_the_document_is_plain_data(model: nn.Sequential) -> None:
    p = policy("bf16")
    p.apply(model)
    run(model)
    document = json.loads(json.dumps(audit_model(p, model).to_json()))
    assert document["ok"] is True
    row = document["layers"][1]
    assert {"name", "requested", "executed", "ok", "reason"} <= set(row)
    assert row["executed"] == {"fprop": "bf16", "dgrad": "bf16", "wgrad": "bf16"}
    assert document["operators"]["activations"]["requested"] == "keep"


def test_a_layer_that_is_kept_runs_under_the_policys_autocast(model: nn.Sequential) -> None:
    p = Policy.model_validate({"activations": "bf16"})
    p.apply(model)
    run(model)
    reasons = {row.reason for row in p.audit(model).layers}
    assert reasons == {"as the script wrote it, under bf16 autocast"}


@pytest.mark.filterwarnings("ignore")  # Dynamo's own deprecations
def test_inside_a_compiled_graph(model: nn.Sequential) -> None:
    p = Policy.model_validate({"recipes": {"b": BUILTIN_RECIPES["bf16"]}, "default": "b", "activations": "bf16"})
    net = nn.Sequential(model[0], nn.LayerNorm(32), model[1])
    p.apply(net)
    torch._dynamo.reset()
    torch.compile(net, backend="eager", fullgraph=True)(torch.randn(4, 32)).sum().backward()
    assert p.audit(net).ok


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(32, 32)
        self.unused = nn.Linear(32, 32)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.ReLU()) for _ in range(3))

    def forward(self, x: torch.Tensor, chosen: int = 0) -> torch.Tensor:
        return self.experts[chosen](self.gate(x))


def test_an_expert_that_was_not_reached_is_no_mismatch_but_an_unused_layer_is() -> None:
    model, p = Experts(), policy("bf16", match="experts.*")
    p.apply(model)
    assert {row.reason for row in p.audit(model).mismatches} == {"never called"}  # none of them was reached
    model(torch.randn(4, 32)).sum().backward()
    report = p.audit(model)
    assert report.ok
    rows = {row.name: row for row in report.layers}
    assert rows["experts.0.0"].executed == {"fprop": "bf16", "dgrad": "bf16", "wgrad": "bf16"}
    assert rows["experts.1.0"].executed == {}
    assert "not called in this step" in rows["experts.1.0"].reason
    everything = policy("bf16", match="*")
    everything.apply(model)
    model(torch.randn(4, 32)).sum().backward()
    assert [row.name for row in everything.audit(model).mismatches] == ["unused"]


class Tail(nn.Module):
    """A head whose output is thrown away, and a block that nothing trains before it."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.unused_head = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.body(x)
        self.unused_head(h)
        return h


@pytest.mark.parametrize("name", ["bf16", "fp8_rowwise"])
def test_a_layer_that_no_gradient_reached_is_listed_apart_and_is_no_mismatch(name: str) -> None:
    model, p = Tail(), policy(name, match="*")
    p.apply(model)
    model(torch.randn(4, 32)).sum().backward()
    report = p.audit(model)
    assert report.ok
    assert report.did_not_run == {"unused_head": ["dgrad", "wgrad"]}
    assert report.to_json()["did_not_run"] == {"unused_head": ["dgrad", "wgrad"]}
    execution_of(model.unused_head).ran["fprop"] = "fp32"
    assert not p.audit(model).ok  # what did run must be what was asked


def test_a_report_prints_as_a_table(model: nn.Sequential) -> None:
    p = policy("fp8_rowwise")
    p.apply(model)
    run(model)
    lines = str(p.audit(model)).splitlines()
    assert lines[0].split() == ["layer", "or", "operator", "requested", "executed", "ok", "reason"]
    assert lines[1].startswith("0 ")
    assert " yes  " in lines[1]
    assert lines[-1] == "everything that ran is what was asked for"
    execution_of(model[1]).ran["wgrad"] = "bf16"
    report = p.audit(model)
    assert "(fprop, dgrad), bf16 (wgrad)" in str(report)
    assert "1 of them ran something else" in repr(report)


def test_emulation_is_told_in_one_line(model: nn.Sequential) -> None:
    assert emulated_note(model) == ""
    policy("bf16").apply(model)
    assert emulated_note(model) == ""
    policy("fp8_rowwise").apply(model)
    assert emulated_note(model).startswith("2 layers run fp8 row")


@pytest.mark.parametrize(
    ("head", "executed", "rounded"), [("bf16", "bf16", True), ("bf16_fp32_output", "bf16 -> fp32", False)]
)
def test_the_output_is_asked_for_and_executed_in_fp32(head: str, executed: str, rounded: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 16))
    p = Policy.model_validate(
        {
            "recipes": {"b": BUILTIN_RECIPES["bf16"], "h": BUILTIN_RECIPES[head]},
            "layers": [{"match": "1", "recipe": "h"}],
            "default": "b",
            "activations": "bf16",
        }
    )
    p.apply(model)
    out = model(torch.randn(4, 32))
    out.sum().backward()
    report = p.audit(model)
    assert report.ok
    assert out.dtype is torch.float32
    assert report.layers[1].executed == {"fprop": executed, "dgrad": "bf16", "wgrad": "bf16"}
    assert ("had rounded it" in report.operators["output"]["reason"]) == rounded
    assert torch.equal(out, out.bfloat16().float()) == rounded


class _Plane(nn.Module):
    """A norm over two dimensions: its gain has the shape of a GEMM weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.layer_norm(x, (16, 16), self.weight)


@pytest.mark.parametrize(("match", "ok"), [("*", True), ("1", False)])
def test_a_gain_that_no_rule_names_never_runs_and_is_not_a_mismatch(match: str, ok: bool) -> None:
    model = nn.Sequential(nn.Linear(16, 16), _Plane())
    p = Policy.model_validate({"recipes": {"b": {"format": "bf16"}}, "layers": [{"match": match, "recipe": "b"}]})
    p.apply(model)
    model(torch.randn(2, 16, 16)).sum().backward()
    report = p.audit(model)
    assert report.ok is ok
    assert ("1" in report.did_not_run) is ok
    assert "no F.linear" in report.layers[1].reason


def test_plain_bf16_is_not_called_emulated() -> None:
    """`auto` gives every layer to the backend that emulates 8 bits on a CPU; a plain cast is torch's own."""
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    recipes = {name: BUILTIN_RECIPES[name] for name in ("bf16", "fp8_rowwise")}
    Policy(recipes=recipes, default="bf16", layers=({"match": "1", "recipe": "fp8_rowwise"},)).apply(model)  # type: ignore[arg-type]
    model(torch.randn(16, 32)).sum().backward()
    report = audit_model(Policy(recipes=recipes, default="bf16"), model)
    assert [layer.backend for layer in report.layers] == ["native", "emulated"]


def test_advice_that_cannot_help_is_not_given() -> None:
    """No backend runs a convolution in FP8, the one that emulates included, which was asked for already."""
    model = nn.Sequential(nn.Conv2d(8, 8, 3))
    policy = Policy(recipes={"fp8": BUILTIN_RECIPES["fp8_rowwise"]}, default="fp8")
    with pytest.raises(UnsupportedError) as refused:
        policy.apply(model, backend="emulated")
    assert refused.value.fix == "choose another recipe for it"


def test_what_is_asked_of_the_optimizer_and_never_wrapped_did_not_run(model: nn.Sequential) -> None:
    document = {"optimizer": {"exp_avg": "bf16"}, "communication": {"gradients": "fp8"}}
    p = Policy.model_validate(policy("bf16").model_dump() | document)
    p.apply(model)
    optimizer = torch.optim.AdamW(model.parameters())
    run(model)
    optimizer.step()
    report = p.audit(model)
    assert not report.ok
    assert all(row.ok for row in report.layers)
    assert report.operators["optimizer.exp_avg"]["executed"] == "-"
    assert "wrap_optimizer" in report.operators["optimizer.exp_avg"]["reason"]
    assert report.operators["optimizer.communication"]["ok"], "one process has nobody to send anything to"
    p.wrap_optimizer(optimizer)
    optimizer.step()
    assert p.audit(model).ok
    assert set(p.audit(model).operators) - set(policy("bf16").audit(model).operators) == {
        "optimizer.exp_avg",
        "optimizer.communication",
    }


def test_under_ddp_the_wire_is_audited_too(model: nn.Sequential, tmp_path: Path) -> None:
    p = Policy.model_validate(policy("bf16").model_dump() | {"communication": {"gradients": "fp8"}})

    def one_rank() -> None:
        warnings.simplefilter("ignore")  # of gloo
        torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
        replicated = nn.parallel.DistributedDataParallel(model[:2])
        optimizer = torch.optim.AdamW(replicated.parameters())
        p.apply(replicated)

        def step() -> None:
            replicated(torch.randn(4, 32)).sum().backward()
            optimizer.step()

        p.wrap_optimizer(optimizer) if tmp_path.joinpath("wrap").exists() else None
        step()
        row = p.audit(replicated).operators["optimizer.communication"]
        print(row["executed"], row["ok"], p.audit(replicated).ok)
        os._exit(0)

    bare = Forked(one_rank, cwd=tmp_path).communicate()
    (tmp_path / "store").unlink()
    (tmp_path / "wrap").touch()
    wrapped = Forked(one_rank, cwd=tmp_path).communicate()
    assert (bare.split(), wrapped.split()) == (["-", "False", "False"], ["fp8", "True", "True"])


def test_a_backend_that_never_ran_on_this_device_is_named_where_it_runs_a_scaled_recipe(
    model: nn.Sequential, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EmulatedBackend, "is_experimental", lambda _backend, device: device == "cpu")
    for recipe, expected in (("fp8_rowwise", ("emulated",)), ("bf16", ())):
        p = policy(recipe)
        p.apply(model, backend="emulated")
        run(model)
        report = p.audit(model)
        assert report.experimental == expected
        assert bool(report.to_json()["notes"]) == bool(expected)


@pytest.mark.parametrize("wide", [(0, 1, 2), (0, 1), (2,), ()])
def test_autocast_is_said_to_change_what_it_changes(wide: tuple[int, ...]) -> None:
    """``torch.autocast`` leaves float64 alone: what ran is told, not what was asked for."""

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList(nn.Linear(8, 8, dtype=_wide(i in wide)) for i in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for part in self.parts:
                x = part(x.to(part.weight.dtype))
            return x

    model, asked = Mixed(), Policy(activations="bf16")
    asked.apply(model)
    out = model(torch.randn(4, 8))
    out.sum().backward()
    report = asked.audit(model)
    row = report.operators["activations"]
    expected = {0: "bf16", 3: "fp64"}.get(len(wide), "bf16, fp64")
    assert (row["executed"], row["ok"]) == (expected, len(wide) < 3)
    assert report.operators["output"]["executed"] == ("fp64" if 2 in wide else "fp32")
    assert report.operators["output"]["ok"]
    for number, layer in enumerate(report.layers):
        assert ("float64" in layer.reason) == (number in wide)
        assert layer.ok


def _wide(double: bool) -> torch.dtype:
    return torch.float64 if double else torch.float32


@pytest.mark.parametrize("kind", ["softmax", "norm", "loss", "embedding"])
def test_what_is_protected_in_float64_ran_in_float64(kind: str) -> None:
    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.norm = nn.Embedding(8, 8), nn.LayerNorm(8)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            x = self.norm(self.words(ids)).softmax(-1)
            return nn.functional.mse_loss(x, torch.zeros_like(x))

    model, asked = Whole().double(), Policy(activations="bf16")
    asked.apply(model)
    model(torch.arange(8)).backward()
    row = asked.audit(model).operators[kind]
    assert (row["requested"], row["executed"], row["ok"]) == ("fp32", "fp64", True)
