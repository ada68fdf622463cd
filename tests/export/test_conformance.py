"""Every exporter passes the shipped conformance suite; installable targets are read by the real library."""

from __future__ import annotations

import warnings

import pytest

from autoprec.errors import MissingDependencyError, UnknownNameError, UnsupportedError
from autoprec.export import EXPORTERS, Export, Request, export, exporter
from autoprec.testing.exporters import MODELS, POLICIES, check_exporter, check_files
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


@pytest.mark.parametrize(("target", "case"), [(t, c) for t, cases in EXACT.items() for c in cases])
def test_what_a_target_can_express_is_not_called_lossy(target: str, case: str) -> None:
    assert export(POLICIES[case], target, layers=MODELS["gpt"]).lossy == []


def test_msamp_o2_is_exact() -> None:
    from autoprec.levels import level

    assert export(level("msamp-o2").policy(), "msamp").lossy == []
    assert '"opt_level": "O2"' in export(level("msamp-o2").policy(), "msamp").files["ds_msamp.json"]


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
    assert not any(problem.startswith("bf16 on") for problem in problems)


def test_broken_files_are_caught() -> None:
    assert check_files(Export("x", {"a.py": "def ("}))
    assert check_files(Export("x", {"a.json": "{"}))
    assert check_files(Export("x", {"a.yaml": ""}))
    assert check_files(Export("x", {}))
