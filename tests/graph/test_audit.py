"""Executed precisions: protections are seen in the recorded step, not believed."""

import warnings

import pytest
import torch
from torch import nn

from autoprec.graph.audit import executed_precisions, protection_rows, uncovered_rows
from autoprec.graph.recorder import record_step
from autoprec.policy import Policy
from autoprec.precision.recipes import BUILTIN_RECIPES
from tests.graph.models import Decoder, RMSNorm, token_batch


def recorded(model, autocast):
    def step():
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            out = model(token_batch()[0])
        out.float().square().mean().backward()

    return record_step(model, step)


def test_every_layer_and_gemm_has_its_executed_dtype():
    ran = executed_precisions(recorded(Decoder(), autocast=True))
    assert ran["layers"]["blocks.0.up"] == {"fprop": "bf16", "dgrad": "bf16", "wgrad": "bf16"}
    assert set(ran["operators"]["gemm"]) == {"bf16"}
    plain = executed_precisions(recorded(Decoder(), autocast=False))
    assert {d for roles in plain["layers"].values() for d in roles.values()} == {"fp32"}


def test_a_norm_in_low_precision_is_seen():
    wanted = {"norm": "fp32", "softmax": "fp32", "embedding": "keep", "loss": "fp32"}
    good = protection_rows(recorded(Decoder(), autocast=False), wanted)
    assert all(row["ok"] for row in good.values())
    model = Decoder(norm=RMSNorm).to(torch.bfloat16)
    bad = protection_rows(recorded(model, autocast=False), wanted)
    assert not bad["norm"]["ok"]
    assert "blocks.0.n1" in bad["norm"]["reason"]
    assert "bf16" in bad["norm"]["executed"]
    assert bad["embedding"]["ok"]


def test_what_the_script_computes_beside_the_model_is_told_and_not_the_policys_fault():
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))

    def step():
        with torch.autocast("cpu", torch.bfloat16):
            model(torch.randn(4, 16)).softmax(-1).float().square().sum().backward()

    row = protection_rows(record_step(model, step), {"softmax": "fp32"})["softmax"]
    assert row["ok"]
    assert "bf16" in row["executed"]
    assert "beside the model's forward" in row["reason"]


def test_a_norm_of_a_model_whose_parts_alone_are_called_is_told_and_not_the_policys_fault():
    model = nn.Sequential(nn.Linear(16, 32), nn.RMSNorm(32), nn.Linear(32, 16))

    def step():
        with torch.autocast("cpu", torch.bfloat16):
            out = model[0](torch.randn(4, 16))
            model[2](model[1].to(torch.bfloat16)(out)).float().square().sum().backward()

    row = protection_rows(record_step(model, step), {"norm": "fp32"})["norm"]
    assert "bf16" in row["executed"]
    assert row["ok"]
    assert "beside the model's forward" in row["reason"]


def test_a_policy_shows_in_the_recorded_step():
    from autoprec import Policy

    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
    policy = Policy.model_validate(
        {"recipes": {"bf16": {"format": "bf16"}}, "layers": [{"match": "2", "recipe": "bf16"}]}
    )
    policy.apply(model)
    report = record_step(model, lambda: model(torch.randn(4, 16, requires_grad=True)).sum().backward())
    ran = executed_precisions(report)["layers"]
    assert ran["2"] == {"fprop": "bf16", "dgrad": "bf16", "wgrad": "bf16"}
    assert set(ran["0"].values()) == {"fp32"}


class TiedByHand(nn.Module):
    """An output projection that no layer module runs, and a recurrent layer."""

    def __init__(self):
        super().__init__()
        self.table, self.fc, self.rnn = nn.Embedding(32, 16), nn.Linear(16, 16), nn.GRU(16, 16, batch_first=True)

    def forward(self, ids):
        return self.rnn(self.fc(self.table(ids)))[0] @ self.table.weight.T


def test_weights_that_no_policy_reaches_are_listed_where_the_policy_asks_for_something():
    model = TiedByHand()
    ids = torch.randint(0, 32, (2, 4))

    def step(autocast):
        def run():
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                out = model(ids)
            out.float().square().mean().backward()

        return run

    def rows(name, autocast=False, **rule):
        layers = [{"match": "fc", "recipe": "r"}, *([rule] if rule else [])]
        policy = Policy.model_validate(
            {
                "recipes": {"r": BUILTIN_RECIPES[name]},
                "layers": layers,
                "default": "keep" if name == "fp32" else "r",
            }
        )
        found = uncovered_rows(record_step(model, step(autocast)), {"fc"}, policy)
        return {row["name"]: (row["ok"], row["executed"].get("fprop"), row["reason"]) for row in found}

    assert rows("fp32") == {}  # the default keeps: nothing is at odds
    listed = rows("fp8_rowwise")
    assert not listed["table"][0]
    assert listed["table"][1] == "fp32"
    assert "no policy reaches it" in listed["table"][2]
    assert any(name.startswith("rnn") for name in listed)
    accepted = rows("fp8_rowwise", match="table", recipe="keep", optional=True)
    assert "table" not in accepted
    assert rows("bf16", autocast=True)["table"] == (True, "bf16", "through activations")


class Spectral(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.lift = nn.Linear(8, 8)
        self.weight = nn.Parameter(torch.randn(8, 8, dtype=dtype))

    def forward(self, x):
        return (self.lift(x).to(self.weight.dtype) @ self.weight).abs()


class OfComplex(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(8, 8, dtype=torch.complex64), nn.Conv1d(4, 4, 1, dtype=torch.complex64)

    def forward(self, x):
        return self.two(self.one(x.to(torch.complex64)).view(2, 4, 8)).abs()


@pytest.mark.parametrize(
    ("model", "names", "dtypes"),
    [
        (Spectral(torch.complex64), {"weight"}, {"complex64"}),
        (Spectral(torch.complex128), {"weight"}, {"complex128"}),
        (OfComplex(), {"one", "two"}, {"complex64", "fp32"}),  # torch computes a complex convolution as real ones
    ],
)
def test_a_complex_weight_is_not_tunable_and_what_it_ran_in_is_told(model, names, dtypes):
    report = record_step(model, lambda: model(torch.randn(8, 8)).square().sum().backward())
    layers = {layer.name: layer for layer in report.layers}
    everything = Policy.model_validate({"recipes": {"r": BUILTIN_RECIPES["bf16"]}, "default": "r"})
    rows = {row["name"]: row for row in uncovered_rows(report, {"lift"}, everything)}
    assert rows.keys() == set(names)
    for name, row in rows.items():
        assert not layers[name].tunable
        assert row["reason"] == layers[name].reason
        assert row["reason"].startswith("a complex weight: not tunable")
        assert row["ok"]
        assert row["executed"]
        assert set(row["executed"].values()) <= dtypes


def test_a_float64_step_ran_in_float64():
    model = Decoder().double()
    ran = executed_precisions(recorded(model, autocast=True))
    assert {dtype for roles in ran["layers"].values() for dtype in roles.values()} == {"fp64"}


class HoldsTorchScript(nn.Module):
    def __init__(self, made):
        super().__init__()
        self.inner, self.head = made, nn.Linear(8, 8)

    def forward(self, x):
        return self.head(self.inner(x))


@pytest.mark.parametrize("make", [torch.jit.script, lambda module: torch.jit.trace(module, torch.randn(4, 8))])
def test_a_layer_inside_torchscript_says_so(make):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        model = HoldsTorchScript(make(nn.Sequential(nn.Linear(8, 8), nn.ReLU())))
        report = record_step(model, lambda: model(torch.randn(8, 8)).square().sum().backward())
    inner = [layer for layer in report.layers if layer.name != "head"]
    assert inner
    assert all("TorchScript" in layer.reason and not layer.tunable for layer in inner)
    assert [layer.name for layer in report.tunable] == ["head"]
