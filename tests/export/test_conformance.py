"""What exporters share: their table, the refusal of a lossy export, and who keeps an operator in FP32."""

from __future__ import annotations

import re

import pytest

from autoprec.errors import UnknownNameError, UnsupportedError
from autoprec.export import EXPORTERS, Request, export, exporter
from autoprec.policy import OperatorPolicy
from autoprec.testing.exporters import MODELS, POLICIES
from tests.export.readers import READERS


def test_there_are_eleven() -> None:
    assert len(EXPORTERS) == 11 == len(READERS)
    assert all(exporter(name).name == name and exporter(name).summary for name in EXPORTERS)


#: What each target must express without any loss.
EXACT = {
    "python": ["empty", "bf16", "tensorwise everywhere", "rowwise but the ends", "mixed", "delayed", "blocks"],
    "lightning": ["empty", "bf16", "mixed", "delayed"],
    "torchao": ["empty", "bf16", "tensorwise everywhere", "rowwise but the ends", "mixed"],
    "accelerate": ["empty", "bf16", "rowwise but the ends", "mixed"],
    "transformer-engine": ["empty", "bf16", "tensorwise everywhere", "delayed", "blocks"],
    "megatron": ["bf16", "tensorwise everywhere", "delayed"],
    "dlfw-inspect": ["empty", "bf16", "tensorwise everywhere", "delayed"],
    "deepspeed": ["empty", "bf16", "fp16"],
    "axolotl": ["empty", "bf16", "tensorwise everywhere", "fp16"],
    "torchtitan": ["bf16", "tensorwise everywhere", "rowwise but the ends"],
}


#: Operators that a target cannot keep in FP32 under autocast, or has no autocast for.
OPERATORS_LOST = {
    "deepspeed": ["operators.output: fp32"],
    "dlfw-inspect": ["operators.output: fp32"],
    "torchtitan": ["operators.softmax: fp32", "operators.norm: fp32", "operators.embedding: fp32"],
}


@pytest.mark.parametrize(("target", "case"), [(t, c) for t, cases in EXACT.items() for c in cases])
def test_what_a_target_can_express_is_not_called_lossy(target: str, case: str) -> None:
    done = exporter(target).export(Request(POLICIES[case], MODELS["gpt"]))
    lost = [] if POLICIES[case].activations == "keep" else OPERATORS_LOST.get(target, [])
    assert [loss.what for loss in done.losses] == lost


def test_msamp_o2_is_exact_but_for_the_output() -> None:
    from autoprec.policy.levels import level

    done = export(level("msamp-o2").policy(), "msamp", allow_lossy=True)
    assert [loss.what for loss in done.losses] == ["operators.output: fp32"]
    assert '"opt_level": "O2"' in done.files["ds_msamp.json"]


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
    lost, kept = run("deepspeed", attention="bf16")
    assert "operators.attention: bf16" not in lost
    assert "operators.attention: bf16" in kept


def test_a_lossy_export_is_refused_and_says_what_is_lost() -> None:
    with pytest.raises(UnsupportedError, match=r"one scale per tensor") as caught:
        export(POLICIES["rowwise but the ends"], "transformer-engine", layers=MODELS["gpt"])
    assert "--allow-lossy" in str(caught.value)
    assert export(POLICIES["state"], "torchao", allow_lossy=True).lossy


def test_an_unknown_target_names_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match="torchao"):
        export(POLICIES["bf16"], "torchoa")
