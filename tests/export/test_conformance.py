"""Every exporter passes the shipped conformance suite; installable targets are read by the real library."""

from __future__ import annotations

import re
import warnings
from dataclasses import replace

import pytest

from autoprec.errors import MissingDependencyError, UnknownNameError, UnsupportedError
from autoprec.export import EXPORTERS, Export, Request, export, exporter
from autoprec.policy import OperatorPolicy
from autoprec.testing.exporters import MODELS, POLICIES, check_exporter, check_files, check_operators
from autoprec.testing.readers import READERS


@pytest.mark.parametrize("name", EXPORTERS)
def test_exports_run_what_the_policy_says_or_list_the_difference(name: str) -> None:
    try:
        with warnings.catch_warnings():  # third-party libraries warn on import
            warnings.simplefilter("ignore")
            assert check_exporter(exporter(name), READERS[name]) == []
    except MissingDependencyError as error:
        pytest.skip(str(error))


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


def test_an_operator_that_is_not_spoken_of_is_found() -> None:
    request = Request(POLICIES["bf16"], MODELS["gpt"])
    done = exporter("torchao").export(request)
    assert check_operators(request, done) == []
    silent = replace(done, kept={})
    assert len(check_operators(request, silent)) == 5


def test_a_lossy_export_is_refused_and_says_what_is_lost() -> None:
    with pytest.raises(UnsupportedError, match=r"one scale per tensor") as caught:
        export(POLICIES["rowwise but the ends"], "transformer-engine", layers=MODELS["gpt"])
    assert "--allow-lossy" in str(caught.value)
    assert export(POLICIES["state"], "torchao", allow_lossy=True).lossy


def test_an_unknown_target_names_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match="torchao"):
        export(POLICIES["bf16"], "torchoa")


def test_the_suite_catches_an_exporter_that_lies() -> None:
    class Liar:
        name, summary = "liar", "says bf16 everywhere"

        def export(self, request: Request) -> Export:
            return Export(self.name, {"x.yaml": "a: 1\n"})

    def reader(_done: Export, request: Request) -> dict[str, dict[str, str]]:
        return {layer: dict.fromkeys(("fprop", "dgrad", "wgrad"), "high") for layer in request.layers}

    problems = check_exporter(Liar(), reader)
    assert any("the policy says fp8 row current e4m3*e4m3, the export runs high" in problem for problem in problems)
    assert not any("the policy says" in problem for problem in problems if problem.startswith("bf16 on"))
    assert any("operators.softmax: fp32 is spoken of 0 times" in problem for problem in problems)


def test_broken_files_are_caught() -> None:
    assert check_files(Export("x", {"a.py": "def ("}))
    assert check_files(Export("x", {"a.json": "{"}))
    assert check_files(Export("x", {"a.yaml": ""}))
    assert check_files(Export("x", {}))
