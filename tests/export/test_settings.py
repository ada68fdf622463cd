"""What a policy says beside its layers is kept by something that is named, or lost, and never both."""

from __future__ import annotations

import re
import warnings

import pytest
import torch
from torch import nn

from autoprec import Policy
from autoprec.export import EXPORTERS, Request, export, exporter
from autoprec.export.base import Losses
from autoprec.export.settings import OPERATORS, report_settings
from autoprec.policy import OperatorPolicy, policy_from_dict
from autoprec.support.optional import is_available
from tests.conformance.exporters import MODELS, POLICIES
from tests.export.readers import load_source


def test_who_keeps_an_operator_in_fp32_is_named() -> None:
    kept = {name: exporter(name).export(Request(POLICIES["delayed"], MODELS["gpt"])).kept for name in EXPORTERS}
    assert "torch.autocast" in kept["torchao"]["operators.softmax: fp32"]
    assert "LayerNorm kernels" in kept["accelerate"]["operators.norm: fp32"], "this backend swaps the norms too"
    assert "exported module" in kept["transformer-engine"]["operators.output: fp32"]
    assert "--attention-softmax-in-fp32" in kept["megatron"]["operators.softmax: fp32"]
    nothing = exporter("torchao").export(Request(POLICIES["unprotected"], MODELS["gpt"]))
    assert nothing.kept == {}
    assert nothing.losses == ()


@pytest.mark.parametrize("name", EXPORTERS)
def test_who_runs_attention_in_its_own_dtype_is_said(name: str) -> None:
    """An exported module does it itself; a target that reads a configuration says what it does instead."""
    done = exporter(name).export(Request(POLICIES["attention"], MODELS["gpt"]))
    what = "operators.attention: fp32"
    if name in ("python", "lightning", "torchao", "transformer-engine", "accelerate"):
        assert done.kept[what] == "the exported module, inside the model's forward"
        assert re.search(r'^ATTENTION = ("fp32"|torch.float32)', "".join(done.files.values()), re.MULTILINE)
    else:
        assert [loss.instead for loss in done.losses if loss.what == what] != []


def test_attention_is_lost_where_accelerate_gets_no_module_and_kept_where_activations_are_the_same() -> None:
    def run(name: str, **operators: str) -> tuple[list[str], dict[str, str]]:
        policy = POLICIES["delayed"].model_copy(update={"operators": OperatorPolicy.model_validate(operators)})
        done = exporter(name).export(Request(policy, MODELS["gpt"]))
        return [loss.what for loss in done.losses], done.kept

    lost, _ = run("accelerate", attention="fp32")
    assert "operators.attention: fp32" in lost
    lost, kept = run("megatron", attention="bf16")
    assert "operators.attention: bf16" not in lost
    assert "operators.attention: bf16" in kept


class _Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(16, 16)
        self.seen: list[torch.dtype] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self.proj(x)
        out = torch.nn.functional.scaled_dot_product_attention(q, q, q)
        self.seen = [q.dtype, out.dtype, torch.softmax(out, -1).dtype]
        return out


@pytest.mark.parametrize("target", ["python", "torchao"])
@pytest.mark.parametrize("attention", ["keep", "fp32"])
def test_attention_runs_in_its_own_dtype(target: str, attention: str) -> None:
    if target == "torchao" and not is_available("torchao"):
        pytest.skip("torchao is not installed")
    document = {
        "schema": "autoprec.policy/1",
        "recipes": {"bf16": {"format": "bf16"}},
        "default": "bf16",
        "activations": "bf16",
        "operators": {"attention": attention},
    }
    done = export(policy_from_dict(document, cls=Policy), target)
    assert done.lossy == []
    name = next(iter(done.files)).removesuffix(".py")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = load_source(done.files[f"{name}.py"], name)
    model = module.apply(_Attending())
    x = torch.randn(1, 2, 8, 16)
    if target == "python":
        out = model(x)
        assert out.dtype is torch.float32  # operators.output
        assert model.seen[2] is torch.float32
    else:
        with module.autocast("cpu"):
            out = model(x)
    assert model.seen[0] is torch.bfloat16
    assert model.seen[1] is (torch.float32 if attention == "fp32" else torch.bfloat16)


def test_every_operator_is_kept_or_lost_and_never_both() -> None:
    for name in EXPORTERS:
        done = exporter(name).export(Request(POLICIES["delayed"], MODELS["gpt"]))
        lost = {loss.what for loss in done.losses}
        for operator in OPERATORS:
            what = f"operators.{operator}: fp32"
            assert (what in done.kept) != (what in lost), (name, what)


def test_without_autocast_nothing_is_narrowed_so_nothing_is_lost() -> None:
    policy = POLICIES["delayed"].model_copy(update={"activations": "keep"})
    losses = Losses()
    report_settings(Request(policy), losses, "the script", lost={"output": "the autocast dtype"})
    assert losses.found == []
    assert set(losses.kept) == {f"operators.{name}: fp32" for name in OPERATORS}


def test_state_that_a_target_does_not_carry_is_lost_part_by_part() -> None:
    def lost(*own: str) -> list[str]:
        losses = Losses()
        report_settings(Request(POLICIES["state"]), losses, "the script", kept={"output": "the module"}, own=own)
        return [loss.what for loss in losses.found]

    state = ["optimizer.weights: fp16_scaled", "optimizer.exp_avg: e4m3", "optimizer.exp_avg_sq: fp16_scaled"]
    assert lost() == [*state, "communication.gradients: fp8"]
    assert lost("gradients") == state
    assert lost("optimizer", "gradients") == []


@pytest.mark.parametrize(("scales", "asked"), [(True, "none"), (False, "dynamic")])
def test_a_loss_that_is_scaled_unasked_or_not_scaled_is_said(scales: bool, asked: str) -> None:
    fp16 = POLICIES["fp16"].model_copy(update={"loss_scaling": asked})
    for wrong in (False, True):
        losses = Losses()
        report_settings(Request(fp16), losses, "the script", scales=scales != wrong, kept={"output": "the module"})
        found = [loss for loss in losses.found if loss.what.startswith("loss_scaling")]
        assert [loss.instead.split(":")[0] for loss in found] == ([] if wrong else ["dynamic" if scales else "none"])
