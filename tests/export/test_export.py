"""The table of exporters, what each expresses without a loss, and the refusal of a lossy export."""

from __future__ import annotations

import warnings

import pytest
from torch import nn

from autoprec.errors import UnknownNameError, UnsupportedError
from autoprec.export import EXPORTERS, Request, exact_target, export, exporter
from autoprec.policy import Phase, RolloutPolicy, policy_from_dict
from autoprec.support.optional import is_available
from tests.conformance.exporters import MODELS, POLICIES
from tests.export.readers import load_source


def test_an_exporter_has_the_name_it_is_asked_by() -> None:
    assert all(exporter(name).name == name for name in EXPORTERS)


#: What each target must express without any loss.
EXACT = {
    "python": ["empty", "bf16", "tensorwise everywhere", "rowwise but the ends", "mixed", "delayed", "blocks"],
    "lightning": ["empty", "bf16", "mixed", "delayed"],
    "torchao": ["empty", "bf16", "tensorwise everywhere", "rowwise but the ends", "mixed"],
    "accelerate": ["empty", "bf16", "rowwise but the ends", "mixed", "delayed, fast fprop"],
    "transformer-engine": ["empty", "bf16", "tensorwise everywhere", "delayed", "blocks", "delayed, fast fprop"],
    "megatron": ["bf16", "tensorwise, fast fprop", "delayed, fast fprop", "blocks"],
    "dlfw-inspect": ["empty", "bf16", "tensorwise, fast fprop", "delayed, fast fprop"],
    "torchtitan": ["bf16", "rowwise, fast fprop", "microscaling"],
}


#: Operators that a target cannot keep in FP32 under autocast, or has no autocast for.
ALWAYS_LOST = {
    "dlfw-inspect": ["activations: bf16", "operators.output: fp32"],
    "torchtitan": ["operators.softmax: fp32", "operators.norm: fp32", "operators.embedding: fp32"],
}


@pytest.mark.parametrize(("target", "case"), [(t, c) for t, cases in EXACT.items() for c in cases])
def test_what_a_target_can_express_is_not_called_lossy(target: str, case: str) -> None:
    done = exporter(target).export(Request(POLICIES[case], MODELS["gpt"]))
    lost = [] if POLICIES[case].activations == "keep" else ALWAYS_LOST.get(target, [])
    assert [loss.what for loss in done.losses] == lost


def test_a_lossy_export_is_refused_and_says_what_is_lost() -> None:
    with pytest.raises(UnsupportedError, match=r"one scale per tensor") as caught:
        export(POLICIES["rowwise but the ends"], "transformer-engine", layers=MODELS["gpt"])
    assert "--allow-lossy" in str(caught.value)
    assert export(POLICIES["state"], "torchao", allow_lossy=True).lossy


def test_an_unknown_target_names_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match="torchao"):
        export(POLICIES["bf16"], "torchoa")


def test_the_target_that_is_recommended_loses_nothing() -> None:
    chosen = {case: exact_target(policy) for case, policy in POLICIES.items()}
    for case in ("rowwise but the ends", "blocks", "delayed"):
        assert exporter(chosen[case]).export(Request(POLICIES[case])).losses == ()
    assert chosen["rowwise but the ends"] == "torchao"
    assert chosen["blocks"] == "transformer-engine", "torchao has no blocks"
    assert chosen["state"] == "python", "no target carries optimizer state: the last resort, which lists what it loses"


@pytest.mark.parametrize("target", EXPORTERS)
def test_the_copy_that_generates_is_listed_as_lost(target: str) -> None:
    lost = POLICIES["bf16"].model_copy(update={"rollout": RolloutPolicy(weights="fp16")})
    assert "rollout" in [loss.what for loss in export(lost, target, layers=MODELS["gpt"], allow_lossy=True).losses]


@pytest.mark.parametrize("target", EXPORTERS)
def test_phases_are_listed_as_lost(target: str) -> None:
    phases = (Phase.model_validate({"from": 0.85, "default": "keep"}),)
    found = [
        [loss.what for loss in export(policy, target, layers=MODELS["gpt"], allow_lossy=True).losses]
        for policy in (POLICIES["bf16"], POLICIES["bf16"].model_copy(update={"phases": phases}))
    ]
    assert found[1] == [*found[0], "phases: default from 85 % of the run"]


CNN = policy_from_dict(
    {
        "schema": "autoprec.policy/1",
        "recipes": {"bf16": {"format": "bf16"}, "fp16": {"format": "fp16"}},
        "layers": [{"match": "conv", "recipe": "bf16"}, {"match": "rnn", "recipe": "bf16"}],
        "default": "keep",
    }
)


@pytest.mark.parametrize("target", ["python", "lightning", "torchao", "accelerate", "transformer-engine", "msamp"])
def test_a_rule_about_another_layer_than_linear_is_lost_where_nothing_else_is_converted(target: str) -> None:
    kinds = {"conv": "conv", "rnn": "rnn", "head": "linear"}
    found = {loss.match: loss for loss in export(CNN, target, layers=kinds, allow_lossy=True).losses}
    assert {"conv", "rnn"} <= found.keys()
    assert "head" not in found
    under = CNN.model_copy(update={"activations": "bf16"})  # autocast runs them as the rules say
    assert not {"conv", "rnn"} & {loss.match for loss in export(under, target, layers=kinds, allow_lossy=True).losses}
    assert any("only nn.Linear" in note for note in export(CNN, target, allow_lossy=True).notes)


@pytest.mark.parametrize("target", ["python", "torchao"])
def test_the_exported_module_warns_of_layers_that_it_leaves(target: str) -> None:
    if target == "torchao" and not is_available("torchao.float8"):
        pytest.skip("torchao is not installed")
    (source,) = export(CNN, target, allow_lossy=True).files.values()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torchao's own, on being compiled
        module = load_source(source, f"left_{target}")
    model = nn.ModuleDict({"conv": nn.Conv1d(4, 4, 1), "rnn": nn.LSTM(4, 4), "head": nn.Linear(4, 4)})
    with pytest.warns(UserWarning, match="only nn.Linear is converted, and a rule is about conv, rnn"):
        module.apply(model)
    module.apply(nn.ModuleDict({"head": nn.Linear(4, 4)}))
